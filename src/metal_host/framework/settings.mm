#include "settings.h"

#include <cstdlib>
#include <cstring>
#include <sstream>

#include "support.h"

namespace lily::metal {
namespace {

uint64_t number(const std::string& key, const std::string& text, uint64_t low, uint64_t high) {
  char* end = nullptr;
  uint64_t value = strtoull(text.c_str(), &end, 10);
  if (text.empty() || *end || text[0] == '-' || value < low || value > high)
    programming_error("LILY_METAL_HOST: %s=%s, expected a number from %llu to %llu", key.c_str(), text.c_str(), (unsigned long long)low,
                      (unsigned long long)high);
  return value;
}

void apply(Settings& s, const std::string& key, const std::string& value) {
  if (key == "workers") {
    s.workers = static_cast<uint32_t>(number(key, value, 0, 1024));
  } else if (key == "order") {
    if (value == "forward") s.order = LILY_ORDER_FORWARD;
    else if (value == "reverse") s.order = LILY_ORDER_REVERSE;
    else if (value == "random") s.order = LILY_ORDER_RANDOM;
    else programming_error("LILY_METAL_HOST: order=%s, expected forward, reverse or random", value.c_str());
  } else if (key == "seed") {
    s.seed = number(key, value, 0, UINT64_MAX);
  } else if (key == "strict") {
    s.strict = static_cast<int>(number(key, value, 0, 2));
    if (s.strict >= 1) s.poison = true;
  } else if (key == "family") {
    s.family = static_cast<int>(number(key, value, 1, 10));
  } else if (key == "max_threads") {
    s.max_threads = static_cast<uint32_t>(number(key, value, 32, LILY_MAX_THREADS));
  } else if (key == "target") {
    s.target = value;
  } else if (key == "cuda_driver") {
    s.cuda_driver = value;
  } else if (key == "nvrtc") {
    s.nvrtc = value;
  } else if (key == "faults") {
    s.faults = number(key, value, 0, UINT32_MAX);
  } else if (key == "poison") {
    s.poison = number(key, value, 0, 1) != 0;
  } else if (key == "hazards") {
    if (value != "on" && value != "off") programming_error("LILY_METAL_HOST: hazards=%s, expected on or off", value.c_str());
    s.hazards = value == "on";
  } else {
    programming_error("LILY_METAL_HOST: unknown key %s (workers, order, seed, strict, family, max_threads, target, poison, faults, hazards, cuda_driver, nvrtc)", key.c_str());
  }
}

Settings read() {
  Settings s;
  const char* text = getenv("LILY_METAL_HOST");
  std::istringstream parts(text ? text : "");
  for (std::string part; std::getline(parts, part, ',');) {
    if (part.empty()) continue;
    size_t equals = part.find('=');
    if (equals == std::string::npos) programming_error("LILY_METAL_HOST: %s, expected key=value", part.c_str());
    apply(s, part.substr(0, equals), part.substr(equals + 1));
  }
  if (s.hazards && s.strict < 2) programming_error("LILY_METAL_HOST: hazards=on sees what instrumented kernels do, add strict=2");
  return s;
}

}  // namespace

LilyOptions Settings::engine_options() const {
  LilyOptions options = {};
  options.workers = workers;
  options.order = order;
  options.strict = strict >= 1 ? LILY_STRICT_SIMD : LILY_STRICT_BARRIERS;
  options.poison = poison ? 1 : 0;
  options.seed = seed;
  return options;
}

const Settings& settings() {
  static const Settings value = read();
  return value;
}

}  // namespace lily::metal
