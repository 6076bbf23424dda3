#include "support.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace lily::metal {

void programming_error(const char* format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  fprintf(stderr, "Metal: %s\n", text);
  fflush(stderr);
  abort();
}

NSString* string(const std::string& text) { return [NSString stringWithUTF8String:text.c_str()]; }
std::string text_of(NSString* string) { return string ? [string UTF8String] : ""; }

NSError* make_error(NSErrorDomain domain, NSInteger code, const std::string& text) {
  id keys[] = {NSLocalizedDescriptionKey}, objects[] = {string(text)};
  return [NSError errorWithDomain:domain code:code userInfo:[NSDictionary dictionaryWithObjects:objects forKeys:keys count:1]];
}

std::string folder_of_this_library() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(&folder_of_this_library), &info) || !info.dli_fname) return ".";
  char* path = realpath(info.dli_fname, nullptr);
  std::string file = path ? path : info.dli_fname;
  free(path);
  // A symbolic link farm (development) keeps its data beside the link, an installed file beside itself.
  std::string beside_link = info.dli_fname;
  for (const std::string& candidate : {beside_link, file}) {
    size_t slash = candidate.rfind('/');
    std::string folder = slash == std::string::npos ? "." : candidate.substr(0, slash);
    if (FILE* probe = fopen((folder + "/_kernels/.").c_str(), "r")) {
      fclose(probe);
      return folder;
    }
  }
  size_t slash = file.rfind('/');
  return slash == std::string::npos ? "." : file.substr(0, slash);
}

namespace {

// FIPS 180-4. Names kernel binaries by their source text, nothing security depends on it.
uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

const uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void compress(uint32_t state[8], const unsigned char* block) {
  uint32_t w[64];
  for (int i = 0; i < 16; i++)
    w[i] = uint32_t(block[4 * i]) << 24 | uint32_t(block[4 * i + 1]) << 16 | uint32_t(block[4 * i + 2]) << 8 | block[4 * i + 3];
  for (int i = 16; i < 64; i++) {
    uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
    uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  uint32_t v[8];
  memcpy(v, state, sizeof v);
  for (int i = 0; i < 64; i++) {
    uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
    uint32_t t1 = v[7] + s1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + kRound[i] + w[i];
    uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
    uint32_t t2 = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
    for (int k = 7; k > 0; k--) v[k] = v[k - 1];
    v[4] += t1;
    v[0] = t1 + t2;
  }
  for (int i = 0; i < 8; i++) state[i] += v[i];
}

}  // namespace

std::string sha256_hex(const std::string& text) {
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::vector<unsigned char> bytes(text.begin(), text.end());
  uint64_t bits = uint64_t(bytes.size()) * 8;
  bytes.push_back(0x80);
  while (bytes.size() % 64 != 56) bytes.push_back(0);
  for (int i = 7; i >= 0; i--) bytes.push_back(static_cast<unsigned char>(bits >> (8 * i)));
  for (size_t at = 0; at < bytes.size(); at += 64) compress(state, &bytes[at]);
  char hex[65];
  for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", state[i]);
  return hex;
}

}  // namespace lily::metal
