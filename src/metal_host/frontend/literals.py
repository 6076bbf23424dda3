"""Metal's literals in C++."""


def number(text: str) -> str:
    """Literals without a suffix are float; h and bf suffixes do not exist in C++."""
    lower = text.lower()
    if lower.startswith("0x"):
        return text
    decimal = "." in text or "e" in lower
    if lower.endswith("bf"):
        return f"(bfloat({text[:-2]}f))" if decimal else f"(bfloat({text[:-2]}.0f))"
    if lower.endswith("h"):
        return f"((half){text[:-1]}{'' if decimal else '.0'}f)"
    if decimal and lower[-1] not in "fl":
        return text + "f"
    return text
