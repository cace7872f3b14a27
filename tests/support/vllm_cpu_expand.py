# Appended to vllm/utils/cpu_triton_utils.py by `make test-engines`. In vLLM 0.32 for CPUs what each
# drafted token is given (temperature, top-k, top-p) is written into a copy, as integers, so that
# drafted text is sampled at no temperature; `draftsmith certify --server` found it. Not of GPUs.


def _expand_kernel_impl(
    output,
    input_val,
    cu_num_tokens,
    replace_from,
    replace_to,
    MAX_NUM_TOKENS=None,  # noqa: N803
):
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    each = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(each.repeat_interleave(counts))
