"""Ways to spoil a good KDTR file, in front of its checksums and behind them. All randomness comes from `rng`."""

import json
import re
import struct
import zlib

NUMBER, WORD, ENTRY = rb"-?\d+", rb'(?<=")[A-Za-z0-9_.]*(?=")', rb'"[\w.]+":\{"dtype"[^}]*\}'
# fmt: off
NUMBERS = [
    "0", "1", "-1", "2", "3", "4", "6", "8", "32", "63", "64", "65", "127", "128", "255", "256",
    "4294967295", "4294967296",
    "-0", "00", "01", "+1", "1.0", "1e0", "64e0", ".5", "1e999", "-1e999", "1e-999", "0x10", "1_0",
    "1e18", "true", "null",
    "2147483648", "1152921504606846976", "4611686018427387904", "9223372036854775807", "9223372036854775808",
    "18446744073709551615", "18446744073709551616", "-9223372036854775808", "NaN", "Infinity",
    "-Infinity", "\u0663",
    '"1"', '""', "[]", "{}", "[1]", "[[1]]",
    "9" * 65, "9" * 5000, "0." + "1" * 5000, "-" + "1" * 4301, "1e" + "9" * 30,
]
SNIPPETS = [
    "{", "}", "[", "]", ",", ":", '"', "\\", " ", "\t", "\n", "\r", "\0", "\x7f", "é", "\ufeff",
    "\u2028", "//", "/**/", "'",
    '"meta":{},', '"arrays":{},', '"a":1,', '"offset":0,', '"dtype":"u8",', '"shape":[0],',
    "[0,4294967296,4294967296]",
    '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\u00"', "\\u0061", '"\\', '\\"', "\\\\", "null",
    "true", "NaN", "1e999",
    "[" * 16 + "]" * 16, "[" * 40, "[" * 5000, '{"":' * 17 + "1" + "}" * 17, '{"a":' * 3000, "]" * 40,
    '"' + "[" * 40 + '"',
]
WORDS = [
    "u8", "i8", "bool", "f16", "bf16", "f32", "f64", "u64", "f8_e4m3", "float32", "F32", "a", "b",
    "w.0", "..", "a/b", "é", "",
]
# fmt: on


def split(content):
    """Header text without its padding, and the data section."""
    (length,) = struct.unpack("<Q", content[8:16])
    return content[24 : 24 + length].rstrip(b" "), content[24 + length :]


def join(text, data, rng):
    """A file with the right length and checksum for its header, whatever that is."""
    text += b" " * (-(24 + len(text)) % 64 + 64 * (rng.random() < 0.1))
    return struct.pack("<4sIQII", b"KDTR", 1, len(text), zlib.crc32(text), 0) + text + data


def mutate_bytes(content, rng):
    """Flip, overwrite, cut, repeat or insert bytes anywhere; most often near the front."""
    where = int(len(content) * rng.random() ** 2)
    span = rng.choice([1, 1, 2, 4, 8, 24, 64, 200])
    noise = rng.choice([b"\0", b"\xff", b"\x80", b" ", rng.randbytes(1)]) * span
    return rng.choice(
        [
            content[:where] + bytes([content[where] ^ 1 << rng.randrange(8)]) + content[where + 1 :],
            content[:where] + noise + content[where + span :],
            content[:where],
            content[:where] + content[where + span :],
            content[:where] + noise + content[where:],
            content[: where + span] + content[where:],
            content + noise,
        ]
    )


def replace_one(pattern, text, choices, rng):
    """`text` with one match of `pattern`, chosen at random, replaced by one of the choices."""
    matches = list(re.finditer(pattern, text))
    if not matches:
        return text + rng.choice(choices).encode()
    match = rng.choice(matches)
    return text[: match.start()] + rng.choice(choices).encode() + text[match.end() :]


def swap_two(pattern, text, rng):
    """`text` with two matches of `pattern` exchanged."""
    matches = list(re.finditer(pattern, text))
    if len(matches) < 2:
        return text
    first, second = sorted(rng.sample(matches, 2), key=re.Match.start)
    middle = text[first.end() : second.start()]
    return text[: first.start()] + second[0] + middle + first[0] + text[second.end() :]


def scale_array(text, rng):
    """`text` with the first dimension and nbytes of one array changed together, so that they agree."""
    tree = json.loads(text)
    for entry in rng.sample(list(tree["arrays"].values()), min(1, len(tree["arrays"]))):
        factor = rng.choice([0, 2, 3, 2**20, 2**40, 2**61])
        entry["shape"] = [factor, *entry["shape"]]
        entry["nbytes"] *= factor
    return json.dumps(tree).encode()


def mutate_text(text, rng):
    """Change a header's text, JSON or not, in a way that a new checksum will hide."""
    where = rng.randrange(len(text))
    mutate = rng.choice(
        [
            lambda: replace_one(NUMBER, text, NUMBERS, rng),
            lambda: replace_one(WORD, text, WORDS, rng),
            lambda: text[:where] + rng.choice(SNIPPETS).encode() + text[where:],
            lambda: swap_two(NUMBER, text, rng),
            lambda: swap_two(ENTRY, text, rng),
            lambda: re.sub(b",?" + ENTRY, b"", text, count=1),
            lambda: mutate_bytes(text, rng),
        ]
    )
    return mutate()


def mutate_header(text, rng):
    """Change what a good header says, or only how it says it."""
    kind = rng.random()
    if kind < 0.1:
        return scale_array(text, rng)
    if kind < 0.2:
        return json.dumps(json.loads(text), indent=rng.randrange(3), ensure_ascii=kind < 0.15).encode()
    return mutate_text(text, rng)


def mutate_data(text, data, rng):
    """Change a byte of the data and give its array the checksum it then has."""
    tree, data = json.loads(text), bytearray(data)
    filled = [entry for entry in tree["arrays"].values() if entry["nbytes"]]
    if filled:
        entry = rng.choice(filled)
        data[entry["offset"] + rng.randrange(entry["nbytes"])] ^= 1 << rng.randrange(8)
        entry["crc32"] = zlib.crc32(data[entry["offset"] : entry["offset"] + entry["nbytes"]])
    return json.dumps(tree).encode(), bytes(data)


def mutant(content, rng):
    """A mutated file, and whether its checksums were left as they were."""
    text, data = split(content)
    kind = rng.random()
    if kind < 0.4:
        return mutate_bytes(content, rng), True
    if kind < 0.45:
        return join(*mutate_data(text, data, rng), rng), False
    text = mutate_header(text, rng)
    if kind < 0.6 and text:
        text = mutate_text(text, rng)
    return join(text, mutate_bytes(data, rng) if data and kind > 0.95 else data, rng), False
