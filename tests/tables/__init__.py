"""Tables of the adapters' tests: a module of calls for each library."""
