"""The steps from an empty database to today's tables, applied by `storage.upgrade`."""
