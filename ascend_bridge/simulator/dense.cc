// Norm, matrix products and quantisation (spec: ascend 5.1).
#include <cmath>
#include <string>

#include "mx.h"

using namespace ascend_sim;

namespace {

// (M, K) x (K, N), sums in float64.
Values Multiply(const Values& a, const Values& b, int64_t m, int64_t k, int64_t n) {
  Values product(static_cast<size_t>(m * n), 0.0);
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t inner = 0; inner < k; ++inner) {
      for (int64_t column = 0; column < n; ++column) {
        product[row * n + column] += a[row * k + inner] * b[inner * n + column];
      }
    }
  }
  return product;
}

Values Transposed(const Values& matrix, int64_t rows, int64_t columns) {
  Values result(matrix.size());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) result[column * rows + row] = matrix[row * columns + column];
  }
  return result;
}

}  // namespace

SIM_EXPORT aclnnStatus aclnnRmsNormGetWorkspaceSize(const aclTensor* x, const aclTensor* gamma, double eps,
                                                    const aclTensor* y, const aclTensor* rstd, uint64_t* bytes,
                                                    aclOpExecutor** executor) {
  return Prepare("aclnnRmsNorm", bytes, executor, [&](Plan& plan) {
    plan.NotNull({{"x", x}, {"gamma", gamma}, {"yOut", y}, {"rstdOut", rstd}});
    plan.Type("x", x, {DataType::kFloat, DataType::kFloat16, DataType::kBf16});
    plan.Type("gamma", gamma, {x->dtype, DataType::kFloat});
    plan.Type("yOut", y, {x->dtype});
    plan.Type("rstdOut", rstd, {DataType::kFloat});
    plan.Require(x->rank() >= 1 && gamma->rank() == 1, "x needs an axis and gamma exactly one");
    plan.Shape("gamma", gamma, {x->dim(-1)});
    plan.Shape("yOut", y, x->dims);
    Dims reduced = x->dims;
    reduced.back() = 1;
    plan.Shape("rstdOut", rstd, reduced);
    plan.Attribute("eps", eps);
    plan.Touches({x, gamma, y, rstd});
    plan.Work([x = *x, gamma = *gamma, eps, y = *y, rstd = *rstd](const Memory& memory) {
      const Values in = memory.Load(x), weight = memory.Load(gamma);
      Values out(in.size()), scales;
      const int64_t width = x.dim(-1);
      for (size_t start = 0; start < in.size(); start += width) {
        double square = 0;
        for (int64_t i = 0; i < width; ++i) square += in[start + i] * in[start + i];
        scales.push_back(1.0 / std::sqrt(square / width + eps));
        for (int64_t i = 0; i < width; ++i) out[start + i] = weight[i] * (in[start + i] * scales.back());
      }
      memory.Store(y, out);
      memory.Store(rstd, scales);
    });
  });
}
SIM_PHASE_TWO(aclnnRmsNorm)

SIM_EXPORT aclnnStatus aclnnMatmulGetWorkspaceSize(const aclTensor* a, const aclTensor* b, const aclTensor* out,
                                                   int8_t cube_math, uint64_t* bytes, aclOpExecutor** executor) {
  return Prepare("aclnnMatmul", bytes, executor, [&](Plan& plan) {
    plan.NotNull({{"self", a}, {"mat2", b}, {"out", out}});
    plan.Type("self", a, {DataType::kFloat, DataType::kFloat16, DataType::kBf16});
    plan.Type("mat2", b, {a->dtype});
    plan.Type("out", out, {a->dtype});
    plan.Require(a->rank() == 2 && b->rank() == 2, "self and mat2 must be matrices");
    plan.Require(a->dim(1) == b->dim(0),
                 "self has " + std::to_string(a->dim(1)) + " columns and mat2 " + std::to_string(b->dim(0)) + " rows");
    plan.Shape("out", out, {a->dim(0), b->dim(1)});
    plan.Require(cube_math >= 0 && cube_math <= 3, "cubeMathType is " + std::to_string(cube_math));
    plan.Attribute("cubeMathType", cube_math);
    plan.Touches({a, b, out});
    plan.Work([a = *a, b = *b, out = *out](const Memory& memory) {
      memory.Store(out, Multiply(memory.Load(a), memory.Load(b), a.dim(0), a.dim(1), b.dim(1)));
    });
  });
}
SIM_PHASE_TWO(aclnnMatmul)

SIM_EXPORT aclnnStatus aclnnDynamicMxQuantGetWorkspaceSize(const aclTensor* x, int64_t axis, const char* round_mode,
                                                           int64_t dst_type, int64_t block, int64_t scale_rule,
                                                           const aclTensor* y, const aclTensor* scale, uint64_t* bytes,
                                                           aclOpExecutor** executor) {
  return Prepare("aclnnDynamicMxQuant", bytes, executor, [&](Plan& plan) {
    plan.NotNull({{"x", x}, {"roundMode", round_mode}, {"yOut", y}, {"mxscaleOut", scale}});
    plan.Type("x", x, {DataType::kFloat16, DataType::kBf16});
    plan.Type("yOut", y, {DataType::kFloat8E4m3});
    plan.Type("mxscaleOut", scale, {DataType::kFloat8E8m0});
    plan.Require(x->rank() >= 1 && (axis == -1 || axis == x->rank() - 1), "the simulator quantises the last axis only");
    plan.Require(std::string(round_mode) == "rint", std::string("roundMode is ") + round_mode);
    plan.Require(dst_type == static_cast<int64_t>(y->dtype), "dstType is " + std::to_string(dst_type));
    plan.Require(block == kMxGroup, "blocksize is " + std::to_string(block));
    plan.Require(scale_rule == 0 || scale_rule == 1, "scaleAlg is " + std::to_string(scale_rule));
    plan.Shape("yOut", y, x->dims);
    plan.Shape("mxscaleOut", scale, MxScaleDims(x->dims));
    plan.Attribute("axis", axis);
    plan.Attribute("blocksize", block);
    plan.Attribute("scaleAlg", scale_rule);
    plan.Touches({x, y, scale});
    plan.Work([x = *x, scale_rule, y = *y, scale = *scale](const Memory& memory) {
      const MxRows rows = QuantiseE4m3(memory.Load(x), x.dim(-1), scale_rule);
      memory.Store(y, rows.codes);
      memory.Store(scale, rows.scales);
    });
  });
}
SIM_PHASE_TWO(aclnnDynamicMxQuant)

SIM_EXPORT aclnnStatus aclnnQuantMatmulV5GetWorkspaceSize(const aclTensor* x1, const aclTensor* x2,
                                                          const aclTensor* x1_scale, const aclTensor* x2_scale,
                                                          const aclTensor* y_scale, const aclTensor* x1_offset,
                                                          const aclTensor* x2_offset, const aclTensor* y_offset,
                                                          const aclTensor* bias, bool transpose_x1, bool transpose_x2,
                                                          int64_t group, const aclTensor* out, uint64_t* bytes,
                                                          aclOpExecutor** executor) {
  return Prepare("aclnnQuantMatmulV5", bytes, executor, [&](Plan& plan) {
    plan.NotNull({{"x1", x1}, {"x2", x2}, {"x1Scale", x1_scale}, {"x2Scale", x2_scale}, {"out", out}});
    plan.Type("x1", x1, {DataType::kFloat8E4m3});
    plan.Type("x2", x2, {DataType::kFloat8E4m3});
    plan.Type("x1Scale", x1_scale, {DataType::kFloat8E8m0});
    plan.Type("x2Scale", x2_scale, {DataType::kFloat8E8m0});
    plan.Type("out", out, {DataType::kFloat, DataType::kFloat16, DataType::kBf16});
    plan.Require(!y_scale && !x1_offset && !x2_offset && !y_offset && !bias,
                 "the simulator knows the MX form without output scale, offsets and bias only");
    plan.Require(!transpose_x1 && transpose_x2, "the simulator knows x1 plain and x2 transposed only");
    plan.Require(x1->rank() == 2 && x2->rank() == 2, "x1 and x2 must be matrices");
    plan.Require(x1->dim(1) == x2->dim(1),
                 "x1 has " + std::to_string(x1->dim(1)) + " columns and x2 " + std::to_string(x2->dim(1)));
    plan.Require(group == ((int64_t{1} << 32) | (int64_t{1} << 16) | kMxGroup),
                 "groupSize is " + std::to_string(group) + " and not that of groups of (1, 1, 32)");
    plan.Shape("x1Scale", x1_scale, MxScaleDims(x1->dims));
    plan.Shape("x2Scale", x2_scale, MxScaleDims(x2->dims));
    plan.Shape("out", out, {x1->dim(0), x2->dim(0)});
    plan.Attribute("groupSize", static_cast<double>(group));
    plan.Touches({x1, x2, x1_scale, x2_scale, out});
    plan.Work([x1 = *x1, x2 = *x2, s1 = *x1_scale, s2 = *x2_scale, out = *out](const Memory& memory) {
      const Values a = ApplyMxScales(memory.Load(x1), memory.Load(s1), x1.dims);
      const Values b = ApplyMxScales(memory.Load(x2), memory.Load(s2), x2.dims);
      const int64_t n = x2.dim(0), k = x2.dim(1);
      memory.Store(out, Multiply(a, Transposed(b, n, k), x1.dim(0), k, n));
    });
  });
}
SIM_PHASE_TWO(aclnnQuantMatmulV5)
