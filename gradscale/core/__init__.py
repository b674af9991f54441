"""The pure scaling core: functions of arrays. No state, no process, no host read."""
