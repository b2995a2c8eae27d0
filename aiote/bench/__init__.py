"""Measurements: aiote beside the same loops in plain C over the same provider, and beside other libraries.

Each contestant is a pair of processes (`sides`) that execute lines of text (`work`). The runs of the contestants
alternate (`measure`), so that a ratio compares runs that were close in time on a machine that others share. It must not
know the services.
"""
