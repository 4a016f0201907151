// drive.cc - calls every kernel over sizes around its ends, on heap buffers of exact size, for the sanitizers to judge; what
// they can't see is checked here: every output written and finite, nothing computed from what must not be read.
//
//   drive FAMILY ORDER [FILE:LINE]    ORDER 0 forward, 1 reverse, 2 random; FILE:LINE: the fault to plant
//
// Exit code 0: clean. 3: a check failed. Else a sanitizer's.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "../include/megakit/abi.h"
#include "../include/megakit/portable.h"

extern "C" void simt_set_order(int order, uint64_t seed);
extern "C" void simt_set_mutant(const char* place);

namespace {

using mk::bf16;
using mk::from_float;
using mk::to_float;

template <class T>
constexpr int kType = std::is_same_v<T, float> ? 0 : 1;

void check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "drive: %s\n", what);
  std::exit(3);
}

double uniform() { return double(std::rand()) / RAND_MAX - 0.5; }

// A tensor: NaN until it is written.
template <class T>
struct Buffer {
  size_t n;
  std::unique_ptr<T[]> p;

  explicit Buffer(size_t size) : n(size), p(new T[size]) { std::memset(p.get(), 0xff, size * sizeof(T)); }
  T* get() { return p.get(); }
  float at(size_t i) const { return to_float(p[i]); }
  Buffer& fill(float value) {
    for (size_t i = 0; i < n; i++) p[i] = from_float<T>(value);
    return *this;
  }
  Buffer& random() {
    for (size_t i = 0; i < n; i++) p[i] = from_float<T>(float(uniform()));
    return *this;
  }
  void written(const char* what) const {
    for (size_t i = 0; i < n; i++) check(std::isfinite(at(i)), what);
  }
};

template <class T>
void norm(int rows, int cols, int blocks, bool layer, bool residual) {
  const size_t n = size_t(rows) * cols;
  Buffer<T> x(n), r(n), w(cols), b(cols), y(n), sum(n), dx(n), dw(cols), db(cols);
  Buffer<float> mean(rows), rstd(rows), part(size_t(layer ? 2 : 1) * blocks * cols);
  x.random(), r.random(), w.fill(1.f), b.fill(0.f);
  check(!mk_norm_forward(y.get(), residual ? sum.get() : nullptr, layer ? mean.get() : nullptr, rstd.get(), x.get(),
                         residual ? r.get() : nullptr, w.get(), layer ? b.get() : nullptr, rows, cols, 0.f, kType<T>, nullptr),
        "norm_forward refuses");
  y.written("y of norm_forward"), rstd.written("rstd");
  if (residual) sum.written("sum of norm_forward");
  for (int row = 0; row < rows && cols > 1; row++) {
    double square = 0;
    for (int c = 0; c < cols; c++) square += double(y.at(size_t(row) * cols + c)) * y.at(size_t(row) * cols + c);
    check(std::fabs(square / cols - 1) < 0.02, "the mean square of y is not 1");
  }
  check(!mk_norm_backward(dx.get(), dw.get(), layer ? db.get() : nullptr, part.get(), y.get(), residual ? r.get() : nullptr,
                          x.get(), w.get(), layer ? mean.get() : nullptr, rstd.get(), rows, cols, blocks, kType<T>, nullptr),
        "norm_backward refuses");
  dx.written("dx of norm_backward"), dw.written("dweight"), part.written("a partial sum");
  if (layer) db.written("dbias");
}

template <class T>
void norms() {
  for (int layer = 0; layer < 2; layer++) {
    for (int cols : {7, 24, 1032, 4104, 8200}) norm<T>(3, cols, 2, layer, cols % 16 == 8);
    norm<T>(40, 40, 33, layer, true);
  }
}

template <class T>
void rope() {
  for (int interleaved = 0; interleaved < 2; interleaved++)
    for (int dim : {2, 16, 10}) {
      const int seq = 3, batch = 2, heads = 3, tokens = seq * batch, gap = dim == 10 ? 10 : 0, stride = heads * dim + gap;
      Buffer<T> x(size_t(tokens) * stride - gap), out(size_t(tokens) * heads * dim);
      Buffer<float> cos(size_t(seq) * dim / 2), sin(size_t(seq) * dim / 2);
      x.random(), cos.random(), sin.random();
      if (gap)  // what lies between the tokens' heads is not of this kernel
        for (int t = 0; t + 1 < tokens; t++)
          for (int i = 0; i < gap; i++) x.p[size_t(t) * stride + heads * dim + i] = from_float<T>(NAN);
      for (int inverse = 0; inverse < 2; inverse++)
        check(!mk_rope(out.get(), x.get(), cos.get(), sin.get(), tokens, heads, dim, heads * dim, stride, batch, 0, interleaved,
                       inverse, kType<T>, nullptr),
              "rope refuses");
      out.written("a turned head");
      check(!mk_rope(x.get(), x.get(), cos.get(), sin.get(), tokens, heads, dim, stride, stride, batch, 0, interleaved, 0, kType<T>,
                     nullptr),
            "rope in place refuses");
    }
}

template <class T>
void activation() {
  for (int cols : {1, 7, 40, 1032}) {
    const int rows = 5, blocks = 2;
    const size_t n = size_t(rows) * cols;
    Buffer<T> x(2 * n), y(n), dx(2 * n);
    x.random();
    check(!mk_swiglu_forward(y.get(), x.get(), rows, cols, kType<T>, nullptr), "swiglu_forward refuses");
    y.written("y of swiglu");
    check(!mk_swiglu_backward(dx.get(), y.get(), x.get(), rows, cols, kType<T>, nullptr), "swiglu_backward refuses");
    dx.written("dx of swiglu");
    for (int tanh = 0; tanh < 2; tanh++)
      for (int biased = 0; biased < 2; biased++) {
        Buffer<T> in(n), out(n), din(n), bias(cols), dbias(cols);
        Buffer<float> part(size_t(blocks) * cols);
        in.random(), bias.random();
        T* const b = biased ? bias.get() : nullptr;
        check(!mk_gelu_forward(out.get(), in.get(), b, rows, cols, tanh, kType<T>, nullptr), "gelu_forward refuses");
        out.written("y of gelu");
        check(!mk_gelu_backward(din.get(), biased ? dbias.get() : nullptr, biased ? part.get() : nullptr, out.get(), in.get(), b,
                                rows, cols, blocks, tanh, kType<T>, nullptr),
              "gelu_backward refuses");
        din.written("dx of gelu");
        if (biased) dbias.written("dbias of gelu");
      }
  }
}

template <class T>
void loss() {
  for (int stride : {7, 24, 4104})
    for (int padding : {0, 3}) {
      const int rows = 4, cols = stride - padding, first = 100;
      Buffer<T> z(size_t(rows) * stride);
      Buffer<float> stats(size_t(4) * rows), max(rows), exps(rows), grad(1);
      const std::unique_ptr<int64_t[]> labels(new int64_t[rows]{first, first + cols - 1, first + cols, -100});
      z.random(), grad.fill(1.f);
      for (int row = 0; row < rows; row++)
        for (int c = cols; c < stride; c++) z.p[size_t(row) * stride + c] = from_float<T>(NAN);
      check(!mk_loss_forward(stats.get(), z.get(), labels.get(), rows, cols, stride, first, kType<T>, nullptr),
            "loss_forward refuses");
      stats.written("statistics of the loss");
      check(stats.at(2 * rows + 2) == 0.f && stats.at(2 * rows + 3) == 0.f, "a label that is not here has a logit");
      for (int row = 0; row < rows; row++) max.p[row] = stats.at(row), exps.p[row] = stats.at(rows + row);
      check(!mk_loss_backward(z.get(), max.get(), exps.get(), grad.get(), labels.get(), rows, cols, stride, first, -100, 0.1f, cols,
                              1e-3f, kType<T>, nullptr),
            "loss_backward refuses");
      z.written("the gradient of the logits");
      for (int row = 0; row < rows; row++)
        for (int c = 0; c < stride; c++)
          check((c < cols && row != 3) || z.at(size_t(row) * stride + c) == 0.f, "padding or an ignored row has a gradient");
    }
}

template <class T>
void softmax() {
  for (int keys : {7, 24, 1032, 4104})
    for (int causal = 0; causal < 2; causal++)
      for (int masked = 0; masked < 2; masked++) {
        const int batch = 1, heads = 2, queries = 3, rows = batch * heads * queries;
        Buffer<T> x(size_t(rows) * keys), y(size_t(rows) * keys), dx(size_t(rows) * keys);
        const std::unique_ptr<uint8_t[]> allowed(new uint8_t[size_t(queries) * keys]);
        x.random();
        for (int i = 0; i < queries * keys; i++) allowed[i] = i % 3 != 1;
        for (int row = 0; row < rows; row++)
          for (int c = row % queries + 1 + keys - queries; causal && c < keys; c++)
            x.p[size_t(row) * keys + c] = from_float<T>(NAN);
        check(!mk_softmax_forward(y.get(), x.get(), masked ? allowed.get() : nullptr, batch, heads, queries, keys, 0.5f, causal,
                                  kType<T>, nullptr),
              "softmax_forward refuses");
        y.written("y of softmax");
        for (int row = 0; row < rows; row++) {
          double total = 0;
          for (int c = 0; c < keys; c++) total += y.at(size_t(row) * keys + c);
          check(std::fabs(total - 1) < 0.03, "a row of the softmax does not sum to 1");
        }
        check(!mk_softmax_backward(dx.get(), y.get(), y.get(), rows, keys, 0.5f, kType<T>, nullptr), "softmax_backward refuses");
        dx.written("dx of softmax");
      }
}

template <class T>
void dropout() {
  for (int n : {1, 7, 8, 16, 2040, 2048}) {
    Buffer<T> x(n), r(n), y(n);
    x.random(), r.random();
    check(!mk_dropout(y.get(), x.get(), r.get(), n, 0.3f, 5, kType<T>, nullptr), "dropout refuses");
    y.written("y of dropout");
    check(!mk_dropout(y.get(), x.get(), nullptr, n, 0.3f, 5, kType<T>, nullptr), "dropout refuses");
  }
}

template <class T>
void optimizer() {
  MegakitShard shards[4];
  std::unique_ptr<Buffer<float>> flat[4][4];
  std::unique_ptr<Buffer<T>> weights[4];
  const int sizes[4] = {1, 1023, 1024, 2046};
  for (int i = 0; i < 4; i++) {
    for (auto& buffer : flat[i]) buffer = std::make_unique<Buffer<float>>(sizes[i]);
    flat[i][0]->random(), flat[i][1]->random(), flat[i][2]->fill(0.5f), flat[i][3]->random();
    weights[i] = std::make_unique<Buffer<T>>(sizes[i]);
    shards[i] = {flat[i][0]->get(), flat[i][1]->get(), flat[i][2]->get(), flat[i][3]->get(), weights[i]->get(), sizes[i], 0.1f,
                 0.01f};
  }
  check(!mk_adamw(shards, 4, 0.9, 0.95, 1e-8, 0.1, 0.05, 1.0, kType<T>, nullptr), "adamw refuses");
  for (int i = 0; i < 4; i++) {
    weights[i]->written("the weights of adamw");
    Buffer<double> part(3);
    check(!mk_square_sum(part.get(), flat[i][0]->get(), sizes[i], 3, nullptr), "square_sum refuses");
    for (int b = 0; b < 3; b++) check(std::isfinite(part.p[b]), "a part of square_sum");
  }
}

}  // namespace

int main(int count, char** words) {
  const std::map<std::string, std::function<void()>> families = {
      {"norm", [] { norms<float>(), norms<bf16>(); }},
      {"rope", [] { rope<float>(), rope<bf16>(); }},
      {"activation", [] { activation<float>(), activation<bf16>(); }},
      {"loss", [] { loss<float>(), loss<bf16>(); }},
      {"softmax", [] { softmax<float>(), softmax<bf16>(); }},
      {"dropout", [] { dropout<float>(), dropout<bf16>(); }},
      {"optimizer", [] { optimizer<float>(), optimizer<bf16>(); }},
  };
  if (count < 3 || !families.count(words[1])) {
    std::fprintf(stderr, "usage: drive FAMILY ORDER [FILE:LINE]\n");
    return 2;
  }
  simt_set_order(std::atoi(words[2]), 7);
  simt_set_mutant(count > 3 ? words[3] : "");
  families.at(words[1])();
  return 0;
}
