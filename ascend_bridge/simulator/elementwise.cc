// Rotary positions, the gated activation, and scattered rows (spec: ascend 5.1).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "mx.h"

using namespace ascend_sim;

SIM_EXPORT aclnnStatus aclnnInplacePartialRotaryMulGetWorkspaceSize(const aclTensor* x, const aclTensor* cos,
                                                                    const aclTensor* sin, int64_t mode,
                                                                    const aclIntArray* slice, uint64_t* bytes,
                                                                    aclOpExecutor** executor) {
  return Prepare("aclnnInplacePartialRotaryMul", bytes, executor, [&](Plan& plan) {
    plan.NotNull({{"xRef", x}, {"cos", cos}, {"sin", sin}, {"partialSlice", slice}});
    plan.Type("xRef", x, {DataType::kFloat, DataType::kFloat16, DataType::kBf16});
    plan.Type("cos", cos, {x->dtype, DataType::kFloat});
    plan.Type("sin", sin, {cos->dtype});
    plan.Require(mode == 1, "rotaryMode is " + std::to_string(mode) + "; only 1, interleaved, is known");
    plan.Require(x->rank() == 4, "xRef has " + std::to_string(x->rank()) + " axes instead of 4");
    plan.Require(slice->values.size() == 2, "partialSlice needs a start and an end");
    const int64_t start = slice->values[0], end = slice->values[1];
    plan.Require(0 <= start && start < end && end <= x->dim(3) && (end - start) % 2 == 0,
                 "partialSlice is " + DimsText(slice->values) + " of " + std::to_string(x->dim(3)) + " channels");
    plan.Shape("cos", cos, {x->dim(0), x->dim(1), 1, end - start});
    plan.Shape("sin", sin, cos->dims);
    plan.Attribute("rotaryMode", mode);
    plan.Attribute("partialSlice[0]", start);
    plan.Attribute("partialSlice[1]", end);
    plan.Touches({x, cos, sin});
    plan.Work([x = *x, cos = *cos, sin = *sin, start, end](const Memory& memory) {
      Values values = memory.Load(x);
      const Values c = memory.Load(cos), s = memory.Load(sin);
      const int64_t width = x.dim(3), heads = x.dim(2), length = end - start;
      for (int64_t row = 0; row < x.count() / width; ++row) {
        double* part = values.data() + row * width + start;
        const int64_t angle = row / heads * length;
        for (int64_t i = 0; i < length; i += 2) {
          const double a = part[i], b = part[i + 1];
          part[i] = a * c[angle + i] - b * s[angle + i];
          part[i + 1] = b * c[angle + i + 1] + a * s[angle + i + 1];
        }
      }
      memory.Store(x, values);
    });
  });
}
SIM_PHASE_TWO(aclnnInplacePartialRotaryMul)

SIM_EXPORT aclnnStatus aclnnSwigluGroupQuantGetWorkspaceSize(const aclTensor* x, const aclTensor* weight,
                                                             const aclTensor* group_index, const aclTensor* scale,
                                                             int64_t dst_type, int64_t quant_mode, int64_t block,
                                                             bool round_scale, double clamp, double dst_type_max,
                                                             bool output_origin, const aclTensor* y,
                                                             const aclTensor* y_scale, const aclTensor* y_origin,
                                                             uint64_t* bytes, aclOpExecutor** executor) {
  return Prepare("aclnnSwigluGroupQuant", bytes, executor, [&](Plan& plan) {
    plan.NotNull({{"x", x}, {"yOut", y}, {"yScaleOut", y_scale}, {"yOriginOut", y_origin}});
    plan.Require(group_index == nullptr && scale == nullptr, "the simulator knows no group index and no static scale");
    plan.Type("x", x, {DataType::kFloat16, DataType::kBf16});
    plan.Type("yOut", y, {DataType::kFloat8E4m3});
    plan.Type("yScaleOut", y_scale, {DataType::kFloat8E8m0});
    plan.Type("yOriginOut", y_origin, {x->dtype});
    plan.Require(x->rank() == 2 && x->dim(1) % 2 == 0, "x must be a matrix with an even number of columns");
    const int64_t rows = x->dim(0), width = x->dim(1) / 2;
    plan.RequireTiling(width % 256 == 0, "D=" + std::to_string(width) + " is not a multiple of 256");
    plan.Require(dst_type == static_cast<int64_t>(y->dtype), "dstType is " + std::to_string(dst_type));
    plan.Require(quant_mode == 1 && round_scale, "the simulator knows quantMode 1 with roundScale only");
    plan.Require(block == kMxGroup, "blockSize is " + std::to_string(block));
    plan.Require(output_origin, "the simulator knows outputOrigin=true only");
    plan.Require(clamp == -1.0 || clamp > 0, "clampLimit is " + std::to_string(clamp));
    if (weight != nullptr) {
      plan.Type("weight", weight, {DataType::kFloat});
      plan.Shape("weight", weight, {rows});
    }
    plan.Shape("yOut", y, {rows, width});
    plan.Shape("yScaleOut", y_scale, MxScaleDims(y->dims));
    plan.Shape("yOriginOut", y_origin, y->dims);
    plan.Attribute("clampLimit", clamp);
    plan.Attribute("dstTypeMax", dst_type_max);
    plan.Touches({x, weight, y, y_scale, y_origin});
    const aclTensor ones{DataType::kFloat, {0}, {1}, 0, 2, {0}, nullptr};
    plan.Work([x = *x, weight = weight ? *weight : ones, clamp, y = *y, y_scale = *y_scale,
               y_origin = *y_origin](const Memory& memory) {
      const Values in = memory.Load(x), factors = memory.Load(weight);
      const int64_t width = y.dim(1);
      Values out(static_cast<size_t>(y.count()));
      for (size_t i = 0; i < out.size(); ++i) {
        const int64_t row = static_cast<int64_t>(i) / width, column = static_cast<int64_t>(i) % width;
        double gate = in[row * 2 * width + column], up = in[row * 2 * width + width + column];
        if (clamp > 0) {
          gate = std::min(gate, clamp);
          up = std::clamp(up, -clamp, clamp);
        }
        const double value = gate / (1.0 + std::exp(-gate)) * up * (factors.empty() ? 1.0 : factors[row]);
        out[i] = RoundTo(x.dtype, value);  // our choice: quantised is what yOriginOut shows
      }
      const MxRows quantised = QuantiseE4m3(out, width, 1);
      memory.Store(y, quantised.codes);
      memory.Store(y_scale, quantised.scales);
      memory.Store(y_origin, out);
    });
  });
}
SIM_PHASE_TWO(aclnnSwigluGroupQuant)

SIM_EXPORT aclnnStatus aclnnScatterNdUpdateGetWorkspaceSize(const aclTensor* variable, const aclTensor* indices,
                                                            const aclTensor* updates, uint64_t* bytes,
                                                            aclOpExecutor** executor) {
  return Prepare("aclnnScatterNdUpdate", bytes, executor, [&](Plan& plan) {
    plan.NotNull({{"varRef", variable}, {"indices", indices}, {"updates", updates}});
    plan.Type(
        "varRef", variable,
        {DataType::kFloat, DataType::kFloat16, DataType::kBf16, DataType::kInt32, DataType::kInt8, DataType::kUint8});
    plan.Type("indices", indices, {DataType::kInt32, DataType::kInt64});
    plan.Type("updates", updates, {variable->dtype});
    plan.Require(variable->rank() >= 1 && indices->rank() == 2 && indices->dim(1) == 1,
                 "the simulator knows indices of shape (n, 1) only");
    Dims wanted = variable->dims;
    wanted[0] = indices->dim(0);
    plan.Shape("updates", updates, wanted);
    plan.Touches({variable, indices, updates});
    plan.Work([variable = *variable, indices = *indices, updates = *updates](const Memory& memory) {
      if (updates.count() == 0) return;
      const Values rows = memory.Load(indices);
      char* target = memory.Bytes(variable);
      const char* source = memory.Bytes(updates);
      const int64_t bytes = updates.count() / updates.dim(0) * BitsOf(updates.dtype) / 8;
      for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] < 0 || rows[i] >= static_cast<double>(variable.dim(0))) {
          throw Refusal{kCoreException, "index " + std::to_string(static_cast<int64_t>(rows[i])) + " of " +
                                            std::to_string(variable.dim(0)) + " rows"};
        }
        std::memcpy(target + static_cast<int64_t>(rows[i]) * bytes, source + static_cast<int64_t>(i) * bytes, bytes);
      }
    });
  });
}
SIM_PHASE_TWO(aclnnScatterNdUpdate)
