"""The command line: ``gradscale doctor``, ``check`` and ``simulate``."""
