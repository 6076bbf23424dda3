// Types shared by every kernel and the host: one args struct per kernel, four-byte scalar fields only.
// python/lily/kernel_args.py reads this text to pack arguments; src/lily_native includes it. Keep each
// struct plain (uint, int, float, and arrays of them), so that offset = 4 * index holds on every side.
#pragma once

#ifndef __METAL_VERSION__
#include <stdint.h>
typedef uint32_t uint;
#endif

// How many decode steps may be in flight, and how long a sampled token stays readable by the host.
#define LILY_RING_SLOTS 3      // conv and GDN state: step reads slot i, writes slot (i + 1) % 3 (DESIGN.md, DecodeLoop)
#define LILY_HISTORY 16        // sampled tokens kept for the host, indexed by step % LILY_HISTORY

#define LILY_RUNNING 0u        // StepState.done
#define LILY_STOPPED 1u        // a stop id was sampled
#define LILY_NONFINITE 2u      // NaN or Inf in the logits

#define LILY_ADJUST_PENALTIES 1u  // SampleParams.adjust: what adjust_logits does
#define LILY_ADJUST_BIAS 2u
#define LILY_ADJUST_MASK 4u
#define LILY_TOP_LOGPROBS 20   // the most alternatives that a request may ask for

// Lives in one small GPU buffer; every step-varying value is here, so a recorded program never changes.
struct StepState {
  uint position;               // tokens already in the state = position of row 0 of the current pass
  uint slot;                   // ring slot that holds the current conv and GDN state
  uint step;                   // sampled tokens so far (index into history, counter of the generator)
  uint done;                   // LILY_RUNNING, LILY_STOPPED or LILY_NONFINITE; once set nothing advances
  uint tokens[2];              // D2: two token slots; step s reads tokens[s & 1], its end writes the other
  uint history[LILY_HISTORY];  // history[s % LILY_HISTORY] = token sampled by step s
  uint flags[LILY_HISTORY];    // value of done after step s
};

struct SampleParams {          // one buffer per session, written before a generation
  float temperature;           // 0 = greedy
  float top_p;                 // 1 = off
  float min_p;                 // 0 = off
  uint top_k;                  // 0 = off
  uint seed_lo, seed_hi;       // counter-based generator: key = seed, counter = StepState.step
  float repetition_penalty;    // 1 = off
  float presence_penalty;      // 0 = off
  float frequency_penalty;     // 0 = off
  uint adjust;                 // LILY_ADJUST_… bits
  uint top_logprobs;
};

struct StepLogprobs {          // of one step; natural logarithms
  uint token;
  float value;                 // of the chosen token
  uint count;                  // how many of the likeliest follow
  uint ids[LILY_TOP_LOGPROBS];
  float values[LILY_TOP_LOGPROBS];
};

struct EmbedArgs { uint rows, hidden, vocab; };
struct NormArgs { uint rows, n; float eps; };
struct GemvArgs { uint rows, n, k, ldx, ldy; };
struct MoeGemvArgs { uint rows, slots, n, k, ldx, ldy, per_slot, experts; };  // per_slot: x has a row per (row, slot), else per row; ids >= experts are skipped
struct GemmArgs { uint rows, n, k, ldx, ldy; };
struct GroupedGemmArgs { uint n, k, ldx, ldy, gather_slots, experts; };  // gather_slots: x row = sorted_rows[i] / gather_slots; 0: x row = i; blocks of ids >= experts exit
struct RouterArgs { uint rows, experts, top_k, shared_slots, ld, ld_shared, normalise; };
struct RouteArgs { uint total, experts, tile, max_blocks; };         // total = rows * slots
struct CombineArgs { uint rows, n, slots, sorted; };                 // sorted: y is in expert order, row_pos maps slots to it
struct SiluMulArgs { uint rows, width, ldx, ldy; };
struct OutputGateArgs { uint rows, heads, head_dim, ldp; };
struct ConvArgs { uint rows, channels, taps, ldp, ring_stride; };
struct QkNormArgs { uint rows, heads, head_dim, ldc; };              // q at column 0, k at heads * head_dim
struct GatesArgs { uint rows, heads, ldb, lda; };
struct ScanArgs { uint rows, k_heads, v_heads, dk, dv, ldc, ring_stride; };
struct GatedNormArgs { uint rows, heads, dv, ldz; float eps; };
struct AttnPrepareArgs { uint rows, q_heads, kv_heads, head_dim, rotary_dim, ldp, k_offset, v_offset, rope_lo_rows; float eps; };
struct AttnArgs { uint rows, q_heads, kv_heads, head_dim, blocks; float scale; };
struct ArgmaxArgs { uint vocab, blocks; };
struct SampleArgs { uint vocab; };
struct FinishArgs { uint rows, blocks, stop_count, sample; };        // sample: take the sampler's token instead of the partial argmax
struct AdvanceArgs { uint rows; };
struct GemvNormArgs { uint n, k; float eps; };
struct GatedNormAddArgs { uint n, k, dv; float eps; };               // k = heads * dv
struct GateAddArgs { uint n, k, head_dim; };                         // k = heads * head_dim
struct MoeGateUpArgs { uint slots, top_k, experts, width, k, matrices; float eps; uint normed, topk, normalise; };  // matrices: experts in w; ids beyond are skipped
struct MoeDownArgs { uint slots, n, k, matrices; };
struct GdnStepArgs { uint k_heads, v_heads, dk, dv, taps, b_offset, a_offset, conv_stride, state_stride; };  // strides: elements of a ring slot
struct ScanNormArgs { uint k_heads, v_heads, dk, dv, ring_stride; float eps; };
struct DequantiseArgs { uint rows, k; };                             // rows: of all experts together
struct ProbeArgs { uint count; };                                     // 16-byte words, or rounds
struct RouteSplitArgs { uint total, experts, tile, max_blocks, tail_tile, max_tail; };  // max_tail: at least min(experts, total)
