"""Records in vLLM: rows of a KVBuffer for drafts and for decode's ring.

`verify` fills a buffer with drafts, `flush` folds the accepted ones after sampling. vLLM keeps a
block with a whole state for each draft token of each request; so it does here where a buffer cannot
be or gains little, and with GATED_DELTA_VLLM_KVBUFFER=0. With 1 the start fails where it cannot be,
and batches may be small. GATED_DELTA_VLLM_RING=1: decode with a buffer, in rows of requests. All
modules import vLLM; layers.py imports them.
"""
