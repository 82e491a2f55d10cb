"""Engines of others that serve our models: the plug-in for vLLM. Nothing here needs vLLM until vLLM asks for it."""
