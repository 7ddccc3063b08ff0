"""Who holds a block, what keys it carries, where free ones come from."""
