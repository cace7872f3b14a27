#!/bin/bash
# Guess: a chat template that asks whether an assistant's content is none, as DeepSeek V3's does to write a tool call, is given the None
#   that OpenAI's format puts there ("content": null beside tool_calls), so the call is in the prompt.
# What happens: transformers takes every key whose value is None out of the messages before it renders them. To the template the content is
#   undefined, which is not none: it writes an assistant's turn without text, and the call is in no prompt. Nothing is said. The same
#   template and messages, rendered by Jinja itself, have the call.
# Packages: transformers 5.24.0, tokenizers as it requires, jinja2 3.1.6.
# Why met: rollouts from recorded conversations with tools; a draft would have learnt from prompts that lack the calls their answers go on from.
# Found: by rows of such conversations that were left out, since the name of the called function was not in the rendered text.
# Seen: transformers [weather?][says ], Jinja [weather?][calls look_up]; with content "" and a template that asks for that, the call is there.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 HF_HOME="$tmp/hf"
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q transformers==5.24.0 jinja2==3.1.6
cat > "$tmp/t.py" <<'PY'
import jinja2
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")

def template(test):
    return ("{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}]"
            "{% elif " + test + " %}[calls {{ m['tool_calls'][0]['function']['name'] }}]"
            "{% else %}[says {{ m['content'] }}]{% endif %}{% endfor %}")

def talk(content):
    call = {"type": "function", "function": {"name": "look_up", "arguments": {}}}
    return [{"role": "user", "content": "weather?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]

def rendered(test, content):
    return tokenizer.apply_chat_template(talk(content), chat_template=template(test), tokenize=False)

asks_none = "m['content'] is none"
by_jinja = jinja2.Environment().from_string(template(asks_none)).render(messages=talk(None))
seen = rendered(asks_none, None)
print(f"transformers {seen}, Jinja {by_jinja}")
assert by_jinja == "[weather?][calls look_up]", "Jinja renders the call"
assert seen == "[weather?][says ]", "changed: transformers renders something else now"
assert rendered("m['content'] == ''", "") == by_jinja, "content of no text reaches the template"
print("as found")
PY
"$tmp/v/bin/python" "$tmp/t.py"
