"""A disaggregated generation, small enough for a laptop and real in every part: `aiote demo kvcache`.

Three processes. The *router* (the command itself) hands prompts to the *decoder*, which has each one's cache filled by
the *prefiller*. What the two say to each other, who may write where and until when, and how the decoder knows that all
is there, is `aiote.kvcache`: its `Decoder` in the one, its `Prefiller` in the other. The prefiller runs the prompt
chunk by chunk; after each layer that layer's pages go straight into the decoder's memory, while the next layer is
computed, and at the end the logits of the last position. Then the decoder generates, and streams tokens to the router,
which compares them with those of a generation in one process.

    tokens.py   bytes to token numbers         model.py    the transformer, numpy, float32
    pages.py    a request's keys and values    weights.py  seeded weights, or a safetensors file
    wire.py     the router's messages          mail.py     the way they go, beside the library's
    child.py    spawning and outliving nobody  worker.py   the entry of each child process
    prefill.py  decode.py  local.py            the three children
    router.py, reference.py  the parent's part of the run, and of the one-process generation
"""
