"""Read and write Hugging Face model folders.

    from farandole.models.hf import from_pretrained

    model = from_pretrained("llama-folder")             # an ordinary model in memory
    engine = farandole.parallelize(from_pretrained("llama-folder", lazy=True), plan)
    engine.save_pretrained("new-folder")                # loads in transformers

Families: gpt2, llama, mistral, qwen2, qwen3, gptj, bert, vit, t5, mixtral and deepseek_v3.
"""

from farandole.models.hf.fields import FolderError
from farandole.models.hf.pretrained import describe, from_pretrained, save_pretrained

__all__ = ["FolderError", "describe", "from_pretrained", "save_pretrained"]
