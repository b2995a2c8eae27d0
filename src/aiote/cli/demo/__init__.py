"""A disaggregated generation, small enough for a laptop and real in every part: `aiote demo kvcache`.

Three processes. The *router* (the command itself) hands prompts to the *decoder*. The decoder takes pages from its
pool, picks an immediate, and asks the *prefiller* to fill them. The prefiller runs the prompt chunk by chunk and, after
each layer, writes that layer's pages of that chunk straight into the decoder's pool by `write_pages`, while it computes
the next layer; at the end one `write_imm` carries the logits of the last position. No message says "done": the decoder
knows that layers x pages + 1 immediates make the whole, and awaits that count. Then it generates, and streams tokens to
the router, which compares them with those of a generation in one process.

    tokens.py   bytes to token numbers         model.py    the transformer, numpy, float32
    pages.py    the paged pool, chunk plans    weights.py  seeded weights, or a safetensors file
    wire.py     the messages, and their codec  mail.py     messages over `engine.send` and `recv`
    child.py    spawning and outliving nobody  worker.py   the entry of each child process
    prefill.py  decode.py  local.py            the three children
    router.py, reference.py  the parent's part of the run, and of the one-process generation
    kvcache.py, report.py    the command and what it prints; weightfile.py the other command
"""
