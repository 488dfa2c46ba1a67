"""A tokenizer with a token a byte, then made-up words `w0`, `w1`, ... to the vocabulary's size."""

from __future__ import annotations

from pathlib import Path

BEGIN, END = 1, 2
_CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write(folder: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<unk>": 0, "<s>": BEGIN, "</s>": END}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        known.setdefault(character, len(known))
    made = Tokenizer(models.BPE(vocab=known, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([f"w{word}" for word in range(vocabulary - len(known))])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
    )
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)
