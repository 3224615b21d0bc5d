"""Descriptions of calls, one module for each family, with the checks of its arguments."""
