"""Measurements: aiote beside the same loops in plain C over the same provider, and beside other libraries.

`aiote bench` is its command. Each contestant is a pair of processes (`sides`), told what to do in lines (`work`), and
the runs of the contestants alternate (`measure`), so that a ratio is of neighbours in time on a machine that others
share.
"""
