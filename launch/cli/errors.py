"""Names of `launch.errors` where programs written for earlier versions import them."""

from launch.errors import ConfigError, RunStopped, Stopped

__all__ = ["ConfigError", "RunStopped", "Stopped"]
