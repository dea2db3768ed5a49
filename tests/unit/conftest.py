"""Hypothesis judges what a function returns, never how long a noisy machine took."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "noisy", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("noisy")
