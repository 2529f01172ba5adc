"""Why tests of vLLM do not pass here, by the test."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from dataclasses import dataclass

FAILED, REFUSED, NOT_APPLICABLE = "failed", "refused by design", "not applicable"
NO_SERVER = "it asks no server: it calls vLLM's own classes"


@dataclass(frozen=True)
class Reason:
    """``tests`` are patterns of ``file.py::test[parameters]``, in which only ``*`` is special.

    ``drawn``: they depend on draws without a seed, so that some runs pass, which are not told from others.
    """

    outcome: str
    why: str
    tests: tuple[str, ...]
    drawn: bool = False

    def covers(self, test: str) -> bool:
        """Whether the test with this id of pytest is one of ``tests``."""
        path, _, name = test.partition("::")
        name = f"{path.rpartition('/')[2]}::{name}"
        return any(fnmatch.fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in self.tests)


def judged(
    outcomes: dict[str, tuple[str, str]], without_server: Collection[str], reasons: tuple[Reason, ...]
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """By test: its outcome, and the reason of one that did not pass; and what makes the lane fail.

    ``outcomes`` are those of pytest, with the first line of a failure; ``without_server`` are tests that were not run.
    """
    found = dict.fromkeys(without_server, (NOT_APPLICABLE, NO_SERVER))
    wrong, used = [], set()
    for test, (raw, detail) in outcomes.items():
        reason = next((each for each in reasons if each.covers(test)), None)
        if reason is not None and (raw == "failed" or reason.drawn):
            used.add(reason)
            found[test] = (reason.outcome, reason.why)
            continue
        found[test] = (raw, detail)
        if raw == "failed":
            wrong.append(f"{test} failed, and there is no reason for it: {detail}")
        elif raw == "passed" and reason is not None:
            wrong.append(f"{test} passed, and there is a reason why it does not: {reason.why}")
    wrong += [f"no test that failed has this reason: {each.why}" for each in reasons if each not in used]
    return found, wrong


# The first that covers a test is its reason.
REASONS: tuple[Reason, ...] = (
    # --- refused by design
    Reason(
        REFUSED,
        "adapters (LoRA) are not served: merge an adapter into the weights, and serve the folder",
        (
            "test_chat.py::*[zephyr-lora]",
            "test_models.py::test_check_models",
            "test_hermes_tool_parser.py::*[llama]",
        ),
    ),
    Reason(
        REFUSED,
        "an extension of vLLM's: `/v1/chat/completions/batch`; chats are sent one by one, and the engine batches them",
        ("test_batched_chat_completions.py::test_batched_chat_completions*",),
    ),
    Reason(
        REFUSED,
        "an extension of vLLM's: `logprob_token_ids`; `top_logprobs` and `prompt_logprobs` give log-probabilities",
        (
            "test_completion.py::test_logprob_token_ids*",
            "test_logprob_token_ids.py::test_logprob_token_ids_returns_requested_ids*",
            "test_logprob_token_ids.py::test_logprob_token_ids_stream_with_no_top_k",
        ),
    ),
    Reason(
        REFUSED,
        "an extension of vLLM's: `return_tokens_as_token_ids`; log-probabilities have texts, as OpenAI's",
        (
            "test_return_tokens_as_ids.py::*",
            "test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs",
        ),
    ),
    Reason(
        REFUSED,
        "an extension of vLLM's: `kv_transfer_params`; one server computes both the prompt and the answer",
        ("test_chat_completion.py::test_kv_transfer_prompt_token_ids*",),
    ),
    Reason(
        REFUSED,
        "beam search is not supported: `n` draws several answers",
        ("test_completion.py::test_batch_completions*",),
    ),
    Reason(
        REFUSED,
        "no parser of reasoning: a model's thoughts are part of its text, and a parameter about them has no meaning",
        (
            "test_include_reasoning.py::*",
            "test_thinking_token_budget.py::test_thinking_token_budget_mixed_requests*",
            "test_thinking_token_budget.py::test_thinking_token_budget_limits_reasoning*",
            "test_completion_with_function_calling.py::test_function_tool_use[plain-True-*",
        ),
    ),
    Reason(
        REFUSED,
        "texts are not watermarked, as vLLM's server in these tests does",
        ("test_completion_with_function_calling.py::test_function_tool_use[watermarked-True-*",),
    ),
    Reason(
        REFUSED,
        "a chat's answer does not repeat its last message (`echo`): the client has it",
        ("test_chat_echo.py::test_chat_session_with_echo_and_continue_final_message*",),
    ),
    Reason(
        REFUSED,
        'types are strict: the text "true" is no boolean',
        ("test_chat_echo.py::test_top_logprobs",),
    ),
    Reason(
        REFUSED,
        "a message's unknown field is refused: it may be misspelt",
        ("test_chat.py::test_extra_fields_allowed",),
    ),
    Reason(
        REFUSED,
        "as in OpenAI's streams, a chat's last chunk has the reason of its end and no text",
        (
            "test_chat.py::test_chat_streaming[HuggingFaceH4/zephyr-7b-beta]",
            "test_chat.py::test_chat_completion_stream_options[HuggingFaceH4/zephyr-7b-beta]",
            "test_chunked_prompt.py::test_chat_completion_stream_options_and_logprobs_with_long_prompts",
        ),
    ),
    Reason(
        REFUSED,
        "an answer that is a call has no content, null, as in OpenAI's API; vLLM's has an empty text",
        ("test_completion_with_function_calling.py::test_named_tool_use",),
    ),
    Reason(
        REFUSED,
        "SageMaker's `/invocations` is another name of `/v1/chat/completions`",
        ("test_chat.py::test_invocations",),
    ),
    Reason(
        REFUSED,
        "usage is sent to a client that asks for it (`stream_options`), and no option forces it on others",
        ("test_enable_force_include_usage.py::*",),
    ),
    Reason(
        REFUSED,
        "no option for a root path: a proxy that serves several paths takes its prefix away",
        ("test_root_path.py::test_chat_session_root_path_with_api_key[test_case3]",),
    ),
    Reason(
        REFUSED,
        "no `/load`: `vllm:num_requests_running` of `/metrics` is the load",
        ("test_basic.py::test_server_load*",),
    ),
    Reason(
        REFUSED,
        "no `/tokenizer_info`: the tokenizer's files are the operator's; `/tokenize` answers what it does",
        (
            "test_tokenization.py::test_tokenizer_info_basic*",
            "test_tokenization.py::test_tokenizer_info_schema",
            "test_tokenization.py::test_tokenizer_info_consistency_with_tokenize",
            "test_tokenization.py::test_tokenizer_info_chat_template",
        ),
    ),
    Reason(
        REFUSED,
        "the server needs the folder's tokenizer, and has no mode without one",
        ("test_token_in_token_out.py::*",),
    ),
    Reason(
        REFUSED,
        "the server runs no code from a model's folder, and this architecture has no other",
        ("test_*.py::*[internlm]",),
    ),
    # --- not applicable
    Reason(
        NOT_APPLICABLE,
        "asserts the version of vLLM",
        ("test_basic.py::test_show_version",),
    ),
    Reason(
        NOT_APPLICABLE,
        "asserts the words of vLLM's error; the status is the same",
        ("test_chat.py::test_long_seed", "test_prompt_validation.py::test_empty_prompt"),
    ),
    Reason(
        NOT_APPLICABLE,
        "needs the trained model's own tokenizer and template: asserts how many tokens a chat has",
        ("test_chat.py::test_single_chat_session[HuggingFaceH4/zephyr-7b-beta]",),
    ),
    Reason(
        NOT_APPLICABLE,
        "needs a trained model: asserts the words of its answer, or that it ends by itself",
        (
            "test_chat.py::test_complex_message_content",
            "test_chat.py::test_response_format_json_object",
            "test_chat.py::test_response_format_json_schema",
            "test_chat.py::test_structured_outputs_json_chat",
            "test_root_path.py::test_chat_session_root_path_with_api_key[test_case2]",
            "test_return_token_ids.py::test_chat_completion_with_emoji_and_token_ids",
            "test_tool_calls.py::test_tool_call_with_results*",
            "test_parallel_tool_calls.py::test_parallel_tool_calls_with_results*",
        ),
    ),
    Reason(
        NOT_APPLICABLE,
        "needs a trained model: one that decides to call a tool",
        (
            "test_completion_with_function_calling.py::test_function_tool_use[*-False-auto-*",
            "test_return_token_ids.py::test_chat_completion_with_tool_use",
            "test_tool_calls.py::test_tool_call_and_choice*",
            "test_parallel_tool_calls.py::test_parallel_tool_calls*",
            "test_hermes_tool_parser.py::*[granite4]",
        ),
    ),
    Reason(
        NOT_APPLICABLE,
        "needs a trained model: asserts that a token of the prompt is the likeliest one",
        ("test_chat.py::test_more_than_one_prompt_logprobs_chat[HuggingFaceH4/zephyr-7b-beta]",),
    ),
    Reason(
        NOT_APPLICABLE,
        "needs a trained model: asserts that it does not draw the same answer twice",
        ("test_chat.py::test_structured_outputs_choice_chat",),
        drawn=True,
    ),
    Reason(
        NOT_APPLICABLE,
        "needs a trained model: asserts that its call ends within the limit",
        ("test_chat_completions.py::test_response_format_with_tool_choice_required*",),
        drawn=True,
    ),
)
