"""The pure core: arithmetic, codecs and state machines, without I/O, without a clock, without an event loop.

Everything here takes bytes, numbers and the present time as arguments and returns decisions, on which the layers above
act. It must not know any of them, and imports nothing of aiote but `aiote.errors`.
"""
