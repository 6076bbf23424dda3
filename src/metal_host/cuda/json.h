// Reads the manifests of kernels: the JSON that the front end writes.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace lily::cuda {

struct Json {
  enum Kind { kNull, kBool, kNumber, kText, kList, kObject } kind = kNull;
  double number = 0;  // also of a bool
  std::string text;
  std::vector<Json> items;                          // list
  std::vector<std::pair<std::string, Json>> fields;  // object

  const Json& at(const char* name) const;  // a null value when there is no such field
  unsigned whole() const { return static_cast<unsigned>(number); }
};

// False when the text is not JSON.
bool parse_json(const std::string& text, Json& value);

}  // namespace lily::cuda
