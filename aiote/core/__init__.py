"""The pure core: arithmetic, codecs and state machines, without I/O, without a clock, without an event loop.

Everything here takes bytes, numbers and the present time as arguments and returns decisions; the floors above act on
them. The core imports nothing of aiote but `aiote.errors`.
"""
