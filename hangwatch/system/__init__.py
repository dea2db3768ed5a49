"""The doors to the outside: each effect has one module here."""
