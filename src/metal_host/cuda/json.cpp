#include "json.h"

#include <cstdlib>
#include <cstring>

namespace lily::cuda {
namespace {

constexpr int kMaxDepth = 32;

class Parser {
 public:
  explicit Parser(const std::string& text) : at_(text.c_str()) {}
  bool whole(Json& value) {
    bool good = parse(value, 0);
    skip();
    return good && *at_ == 0;
  }

 private:
  void skip() {
    while (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t') at_++;
  }
  bool take(char c) {
    skip();
    if (*at_ != c) return false;
    at_++;
    return true;
  }
  bool word(const char* text) {
    size_t length = strlen(text);
    if (strncmp(at_, text, length) != 0) return false;
    at_ += length;
    return true;
  }
  // The front end writes ASCII; an escaped character beyond it is no name of a kernel.
  bool parse_text(std::string& out) {
    if (!take('"')) return false;
    for (; *at_ != '"'; at_++) {
      if (!*at_) return false;
      if (*at_ != '\\') {
        out += *at_;
        continue;
      }
      at_++;
      const char *from = "\"\\/bfnrt", *to = "\"\\/\b\f\n\r\t", *found = *at_ ? strchr(from, *at_) : nullptr;
      if (!found) return false;
      out += to[found - from];
    }
    at_++;
    return true;
  }
  bool parse(Json& value, int depth) {
    if (depth > kMaxDepth) return false;
    skip();
    if (*at_ == '"') {
      value.kind = Json::kText;
      return parse_text(value.text);
    }
    if (take('[')) {
      value.kind = Json::kList;
      if (take(']')) return true;
      do {
        value.items.emplace_back();
        if (!parse(value.items.back(), depth + 1)) return false;
      } while (take(','));
      return take(']');
    }
    if (take('{')) {
      value.kind = Json::kObject;
      if (take('}')) return true;
      do {
        value.fields.emplace_back();
        if (!parse_text(value.fields.back().first) || !take(':') || !parse(value.fields.back().second, depth + 1)) return false;
      } while (take(','));
      return take('}');
    }
    if (word("null")) return true;
    value.kind = Json::kBool;
    if (word("true")) {
      value.number = 1;
      return true;
    }
    if (word("false")) return true;
    value.kind = Json::kNumber;
    char* end = nullptr;
    value.number = strtod(at_, &end);
    bool good = end != at_;
    at_ = end;
    return good;
  }

  const char* at_;
};

}  // namespace

const Json& Json::at(const char* name) const {
  static const Json nothing;
  for (const auto& [field, value] : fields)
    if (field == name) return value;
  return nothing;
}

bool parse_json(const std::string& text, Json& value) { return Parser(text).whole(value); }

}  // namespace lily::cuda
