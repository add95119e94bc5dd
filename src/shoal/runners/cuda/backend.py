"""placeholder"""
from shoal.runners.plan import ModelSpec
def spec_of(decoder, blocks, weight_bytes):
    from shoal.runners.cuda.model import kv_bytes_per_token
    return ModelSpec(name=decoder.name,architecture=decoder.family,runner="cuda",precision="bf16",vocab_size=decoder.vocab_size,context_length=decoder.context_length,block_size=32,num_blocks=blocks,kv_bytes_per_token=kv_bytes_per_token(decoder),weight_bytes=weight_bytes,max_chain=16,max_top=128,exact=True)
