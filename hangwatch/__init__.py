"""A live stack-capture watchdog for LLM inference engines that hang in silence."""

__version__ = "0.1.0"
