"""Programs that really hang: standard library only, run by path under any interpreter."""
