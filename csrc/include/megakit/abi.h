/* abi.h - the plain C interface of the library: raw pointers, sizes, a stream. No torch, no C++.
 *
 * dtype: 0 float, 1 bf16, 2 half; it is that of every `void*` unless said otherwise. Row-major, without gaps, unless said
 * otherwise. Pointers need no alignment; where all are at 16 bytes and rows are a multiple of 16 bytes, accesses are of 16
 * bytes. Nothing is allocated, nothing waits. Result: 0, -1 for a dtype, -2 for a size that a kernel doesn't have, or a
 * positive CUDA error. The emulation takes host pointers and ignores the stream.
 */
#ifndef MEGAKIT_ABI_H
#define MEGAKIT_ABI_H
#include <stdint.h>

/* Of this interface: it changes when a signature or a meaning does. */
#define MEGAKIT_ABI_VERSION 2

#ifdef __cplusplus
extern "C" {
#endif

int megakit_abi_version(void);
/* Of the sources: what the build was made of. */
const char* megakit_source_hash(void);
/* What CUDA says of a positive result. */
const char* megakit_error(int error);

/* Norms. h = x (+ residual, then stored to `sum`), y = (h - mean) rstd weight + bias; RMSNorm has no mean and no bias, and
 * they are null. cols up to 16384. residual and sum may be null. mean and rstd: fp32 [rows], for the backward. */
int mk_norm_forward(void* y, void* sum, float* mean, float* rstd, const void* x, const void* residual, const void* weight,
                    const void* bias, int64_t rows, int cols, float eps, int dtype, void* stream);
/* dx (+= dsum) and the weights' gradients. h as it was normalised. part: fp32 scratch [2 (LayerNorm) or 1, blocks, cols]. */
int mk_norm_backward(void* dx, void* dweight, void* dbias, float* part, const void* dy, const void* dsum, const void* h,
                     const void* weight, const float* mean, const float* rstd, int64_t rows, int cols, int blocks, int dtype,
                     void* stream);

/* Rotary embedding of the first `heads` heads of each token, [tokens, stride elements], heads side by side, `dim` wide. The
 * table's row of token t is t / batch + offset: cos and sin fp32 [positions, dim / 2]. interleaved: pairs (2i, 2i + 1), else
 * (i, i + dim / 2). inverse: turn back (the backward pass). out may be x. */
int mk_rope(void* out, const void* x, const float* cos, const float* sin, int64_t tokens, int heads, int dim,
            int64_t out_stride, int64_t x_stride, int64_t batch, int64_t offset, int interleaved, int inverse, int dtype,
            void* stream);

/* SwiGLU: x [rows, 2 cols], gate before up -> y [rows, cols] = silu(gate) up. */
int mk_swiglu_forward(void* y, const void* x, int64_t rows, int cols, int dtype, void* stream);
int mk_swiglu_backward(void* dx, const void* dy, const void* x, int64_t rows, int cols, int dtype, void* stream);
/* gelu(x + bias) on [rows, cols]; bias may be null. tanh: the approximation. */
int mk_gelu_forward(void* y, const void* x, const void* bias, int64_t rows, int cols, int tanh, int dtype, void* stream);
/* dbias and part (fp32 scratch [blocks, cols]) are null where bias is. */
int mk_gelu_backward(void* dx, void* dbias, float* part, const void* dy, const void* x, const void* bias, int64_t rows,
                     int cols, int blocks, int tanh, int dtype, void* stream);

/* Vocab-parallel cross entropy. stats: fp32 [4, rows] = max, sum exp(z - max), z of the label or 0, sum z over this rank's
 * first `cols` of `stride` columns, which begin at `first` of the vocabulary. labels: int64 [rows]. */
int mk_loss_forward(float* stats, const void* logits, const int64_t* labels, int64_t rows, int cols, int stride, int64_t first,
                    int dtype, void* stream);
/* In place: z <- (exp(z - lse) (1 + 2 z_loss lse) - smoothing / vocab - (1 - smoothing) [z is the label's]) grad, with lse =
 * max + log(exps) of the whole vocabulary; max and exps: fp32 [rows], grad: fp32 [1]. Rows whose label is `ignore` and
 * columns from `cols` on become 0. */
int mk_loss_backward(void* logits, const float* max, const float* exps, const float* grad, const int64_t* labels, int64_t rows, int cols,
                     int stride, int64_t first, int64_t ignore, float smoothing, int64_t vocab, float z_loss, int dtype,
                     void* stream);

/* Softmax of scale x over the keys that a query sees, [batch, heads, queries, keys]. causal: query i sees keys up to
 * i + keys - queries. allowed: bytes [batch, queries, keys], 0: not seen; may be null. A query that sees nothing gets zeros.
 * keys up to 16384. */
int mk_softmax_forward(void* y, const void* x, const uint8_t* allowed, int64_t batch, int heads, int queries, int keys,
                       float scale, int causal, int dtype, void* stream);
/* dx may be dy. */
int mk_softmax_backward(void* dx, const void* dy, const void* y, int64_t rows, int keys, float scale, int dtype, void* stream);

/* y = residual + dropout(x), n elements; residual may be null. Element i is kept where word i % 4 of Philox4x32-10 with key
 * `seed` and counter i / 4 is at least p 2^32, and is scaled by 1 / (1 - p). The backward pass is the same on the gradient,
 * without residual. */
int mk_dropout(void* y, const void* x, const void* residual, int64_t n, float p, uint64_t seed, int dtype, void* stream);

/* AdamW on up to MEGAKIT_SHARDS flat shards in one launch. All fp32 but `weights`, a copy of the master in `dtype`, which may
 * be null. correction: 1 - beta^t. The numbers are doubles: 1 - beta2 of a beta2 in fp32 is 1.3e-5 off for 0.999. */
#define MEGAKIT_SHARDS 48
typedef struct {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  const float* grad;
  void* weights;
  int64_t size;
  float lr;
  float decay; /* lr x weight decay */
} MegakitShard;
int mk_adamw(const MegakitShard* shards, int count, double beta1, double beta2, double eps, double correction1,
             double correction2, double grad_scale, int dtype, void* stream);
/* part[b], fp64 [blocks]: the sum of squares of block b's elements of x, fp32 [n]. */
int mk_square_sum(double* part, const float* x, int64_t n, int blocks, void* stream);

#ifdef __cplusplus
}
#endif
#endif
