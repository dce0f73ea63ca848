"""What test_adapters.py and test_migration.py ask of each adapter: a module of calls for each library."""
