"""The engine loop: transfers are posted, completions are read, and the engine sleeps when there is nothing to do."""
