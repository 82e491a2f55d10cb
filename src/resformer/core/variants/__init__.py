"""One file is one variant: the equation with its source, the options, the plan and the mix."""
