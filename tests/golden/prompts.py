"""What the models are asked. A prompt is a text, or a conversation under the name it has here."""

CHATS = {
    "hello": [{"role": "user", "content": "What is the boiling point of water at sea level?"}],
    "system": [
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "turns": [
        {"role": "user", "content": "Name a prime number above 20."},
        {"role": "assistant", "content": "23 is a prime number above 20."},
        {"role": "user", "content": "And one above 40?"},
    ],
    "code": [{"role": "user", "content": "Write a Python function that reverses a list in place."}],
    "unicode": [{"role": "user", "content": "Übersetze »Guten Morgen« <b>ins</b> Englische & Französische. 🙂"}],
}

# Texts of every kind; "chat:NAME" stands for the rendered conversation.
PROMPTS = {
    "capital": "The capital of France is",
    "prose": "It was late in the autumn when the old ferry stopped crossing the lake, and the people of the village",
    "science": "Photosynthesis is the process by which plants convert light energy into",
    "history": "The first printed books in Europe appeared in the fifteenth century. Before that,",
    "list": "Shopping list:\n- milk\n- eggs\n- bread\n- ",
    "recipe": "To make a simple tomato soup, first chop two onions and",
    "python": "def fibonacci(n):\n    if n < 2:\n        return n\n    ",
    "python_class": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "c": '#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf("%d\\n", i);\n',
    "sql": "SELECT name, COUNT(*) FROM orders GROUP BY name\nHAVING",
    "json": '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "country": "',
    "html": "<!DOCTYPE html>\n<html>\n<head>\n  <title>Weather</title>\n",
    "arithmetic": "1 + 1 = 2\n2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "counting": "one two three four five six seven eight",
    "french": "Il était une fois, dans un petit village,",
    "dialogue": '"Where have you been?" she asked.\n"At the harbour," he said. "The boats',
    "definition": "A confidence interval is",
    "one_token": "The",
    "chat_hello": "chat:hello",
    "chat_system": "chat:system",
    "chat_turns": "chat:turns",
    "chat_code": "chat:code",
    "ledger": "\n".join(
        f"Entry {i}: on day {(7 * i) % 30 + 1} the keeper of house {(11 * i) % 17} received {(13 * i) % 90 + 10} "
        f"letters and sent {(5 * i) % 40 + 3}."
        for i in range(1, 31)
    )
    + "\nEntry 31:",
}

# Texts on which tokenizers differ.
TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n",
    "\t\tx",
    " leading and trailing ",
    "two  spaces   three    four",
    "line\r\nbreaks\rand\n\n  indent",
    "Hello, world!",
    "HELLO hello HeLLo",
    "I'm you're we've it's I'll he'd don't DON'T I'M",
    "0 1 12 123 1234 12345 3.14159 1,000,000 2026-11-30",
    "x1y2z3 a1b2",
    "½ ² Ⅷ ٣ ๓",
    "def f(x):\n    return x**2  # square\n\n\nprint(f(3))\n",
    "if (a!=b && c<=d) { e->f[0]++; }",
    "for\u00a0i\u2003in\u3000range",
    "café cafe\u0301 naïve Ångström",
    "日本語のテキストと中文文本 한국어",
    "Привет, мир! Γειά σου",
    "مرحبا بالعالم שלום",
    "🙂 👩‍👩‍👧 🇨🇭 a🙂b",
    "\u200bzero\u200bwidth\ufeff",
    "https://example.org/a?b=c&d=%20#e",
    "a_b-c.d/e\\f|g~h`i^j@k#l$m%n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><|endoftext|>",
    "<|im_start|> <|im_start|>x<|im_",
    "<tool_call>{}</tool_call>",
    "'''\"\"\"...---===***",
    "antidisestablishmentarianism Donaudampfschifffahrtsgesellschaft",
    "\x00\x01\x7f",
]

# A vocabulary on which the pre-tokenizers differ: merges that cross digits, punctuation and line breaks.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<tool_call>", "</tool_call>"]
MERGES = [
    "1 2", "3 4", "12 3", "123 4", "4 5", ") Ċ", "Ċ Ċ", "ĊĊ Ċ", "č Ċ", ": Ċ", "' t", "' T", "n 't", "N 'T",
    "( x", "_ b", "- c", "Ġ f", "Ġ Ġ", "ĠĠ ĠĠ", "ĉ ĉ", "ĉ x", "h e", "l l", "he ll", "hell o", "Ġ Ċ", "Ġ 1",
    "e Ì", "eÌ ģ", "Ã ©", "c a", "f Ã©", "ca fÃ©", "y 2", "x 1", "> Ċ", "! Ċ", "i n", "Ġ in",
]  # fmt: skip
WHOLE_WORDS = ["Ġworld", "def", "Ġtrailing", "12345"]  # no merges lead to these
