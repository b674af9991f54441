"""The command line, ``gradscale`` and ``python -m gradscale``: doctor, check, simulate, bench."""

__all__: list[str] = []
