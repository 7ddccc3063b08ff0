"""Here so that this folder is on the path of the tests below it, too: they share slot_support.py."""
