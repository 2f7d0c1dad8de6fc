"""Names of the tokens that end a turn of a chat, in the templates of known models.

Some files name only the end of a document as `eos_token_id`, and a chat then goes on past its answer.
llama.cpp knows these names, too, and ends at them.
"""

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>")


def ends_of_turn(template: str | None) -> tuple[str, ...]:
    """Return the known ends of a turn that a chat template writes.

    Example:
        >>> ends_of_turn("{{ message.content }}<|im_end|>")
        ('<|im_end|>',)
    """
    return tuple(name for name in END_OF_TURN if template is not None and name in template)
