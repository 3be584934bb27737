"""The first quarter of an hour on a GPU: arms that compile side by side and are timed one after another."""
