"""A live stack-capture watchdog for LLM inference engines that hang in silence."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hangwatch.system.leasing import lease

__version__ = "0.1.0"
__all__ = ["__version__", "lease"]


def __getattr__(name: str) -> "Any":
    """Load what is asked for, and nothing before."""
    if name == "lease":
        from hangwatch.system.leasing import lease

        return lease
    raise AttributeError(f"module 'hangwatch' has no attribute {name!r}")
