"""The policies that ship, one text a backend."""
