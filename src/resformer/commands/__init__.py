"""What each command does: functions with plain types that Python users can call too; `resformer.cli` names them."""
