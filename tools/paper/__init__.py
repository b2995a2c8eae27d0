"""The published figures of TransferEngine (arXiv 2510.27656) beside ours, cell by cell: docs/paper.md is this output.

Each cell says whether a number of ours was fitted to it ("calibrated") or not ("predicted"), and how many numbers that
were fitted to cells of its table are in our figure. A cell with more than one such number is no evidence. A cell that
is more than 10 % off says why.

    make paper                           print the page, and say whether docs/paper.md is the same: minutes
    make paper ARGS=--write              write docs/paper.md
    make paper ARGS="writes kvcache"     print some sections
    make paper ARGS="--tables moe"       print the tables of docs/moe.md that are simulated
"""
