"""The version of orlop, alone in a module so that nothing need be imported to read it."""

__version__ = "0.1.0.dev0"
