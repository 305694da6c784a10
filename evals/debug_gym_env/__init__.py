"""The environment of debug-gym, which needs Python 3.12 and packages that Leyline's own does not have."""
