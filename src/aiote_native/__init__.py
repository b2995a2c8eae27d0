"""The compiled floor of aiote: memory, work requests, completions and counts, without a word of asyncio.

Nothing here imports `aiote`. Only `aiote.rails` imports this package; everything else goes through the Rail contract.
"""
