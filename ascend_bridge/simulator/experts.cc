// Products of groups of rows with the weights of one expert each (spec: ascend 5.3).
#include <string>

#include "mx.h"

using namespace ascend_sim;

namespace {

constexpr int32_t kNzFormat = 29;
constexpr int64_t kNzRows = 16;
constexpr int64_t kNzBytes = 32;  // of one row of a fractal

const aclTensor* Only(const Plan& plan, const char* what, const aclTensorList* list) {
  plan.NotNull({{what, list}});
  plan.Require(list->members.size() == 1, std::string(what) + " must hold one tensor");
  return list->members[0];
}

// Our reading of FRACTAL_NZ for a matrix (N, K) of 4-bit values: (K / 64, N / 16, 16, 64).
Dims NzDims(const aclTensor& weight) {
  const int64_t columns = kNzBytes * 8 / BitsOf(weight.dtype);
  return {weight.dim(0), weight.dim(2) / columns, weight.dim(1) / kNzRows, kNzRows, columns};
}

void CheckWeight(const Plan& plan, const aclTensor& weight) {
  plan.Require(weight.dtype == DataType::kFloat4E2m1, std::string("weight has the type ") + NameOf(weight.dtype));
  plan.Require(weight.format == kNzFormat, "weight has the format " + std::to_string(weight.format) + " instead of NZ");
  plan.Require(weight.rank() == 3, "weight must have three axes");
  plan.RequireTiling(weight.dim(1) % kNzRows == 0 && weight.dim(2) % 64 == 0,
                     "weight of " + DimsText(weight.dims) + " does not fill NZ fractals of 16 rows and 64 columns");
  plan.Require(weight.storage == NzDims(weight),
               "weight is stored as " + DimsText(weight.storage) + " instead of " + DimsText(NzDims(weight)));
}

// Element (row, column) of one expert in NZ order.
int64_t NzPlace(const Dims& nz, int64_t expert, int64_t row, int64_t column) {
  const int64_t block = column / nz[4] * nz[2] + row / nz[3];
  return ((expert * nz[1] * nz[2] + block) * nz[3] + row % nz[3]) * nz[4] + column % nz[4];
}

// One row times the transposed matrix of an expert; sums in float64.
void MultiplyRow(const double* row, const aclTensor& weight, const Values& codes, const Values& scales, int64_t expert,
                 double* out) {
  const Dims nz = NzDims(weight);
  const int64_t n = weight.dim(1), k = weight.dim(2);
  for (int64_t column = 0; column < n; ++column) {
    double sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      const double scale = scales[(expert * n + column) * (k / kMxGroup) + i / kMxGroup];
      sum += row[i] * codes[NzPlace(nz, expert, column, i)] * scale;
    }
    out[column] = sum;
  }
}

void RunGroups(const Memory& memory, const aclTensor& x, const aclTensor& x_scale, const aclTensor& weight,
               const aclTensor& weight_scale, const aclTensor& groups, const aclTensor& out) {
  const Values rows = ApplyMxScales(memory.Load(x), memory.Load(x_scale), x.dims);
  aclTensor stored = weight;
  stored.strides = {weight.dim(1) * weight.dim(2), weight.dim(2), 1};
  const Values codes = memory.Load(stored), scales = memory.Load(weight_scale), counts = memory.Load(groups);
  const int64_t n = weight.dim(1), k = weight.dim(2);
  Values result(static_cast<size_t>(out.count()), 0.0);
  int64_t row = 0;
  for (int64_t expert = 0; expert < weight.dim(0); ++expert) {
    for (const int64_t end = row + static_cast<int64_t>(counts[expert]); row < end; ++row) {
      if (row >= x.dim(0)) throw Refusal{kCoreException, "the groups have more rows than x"};
      MultiplyRow(rows.data() + row * k, weight, codes, scales, expert, result.data() + row * n);
    }
  }
  memory.Store(out, result);
}

}  // namespace

SIM_EXPORT aclnnStatus aclnnGroupedMatmulWeightNzGetWorkspaceSize(
    const aclTensorList* x_list, const aclTensorList* weight_list, const aclTensorList* bias,
    const aclTensorList* scale, const aclTensorList* offset, const aclTensorList* antiquant_scale,
    const aclTensorList* antiquant_offset, const aclTensorList* per_token_scale, const aclTensor* groups,
    const aclTensorList* activation_input, const aclTensorList* activation_scale,
    const aclTensorList* activation_offset, int64_t split_item, int64_t group_type, int64_t group_list_type,
    int64_t activation, const aclIntArray* tuning, int64_t quant_group, const aclTensorList* out_list,
    const aclTensorList* feature_out, const aclTensorList* scale_out, uint64_t* bytes, aclOpExecutor** executor) {
  return Prepare("aclnnGroupedMatmulWeightNz", bytes, executor, [&](Plan& plan) {
    const aclTensor* x = Only(plan, "x", x_list);
    const aclTensor* weight = Only(plan, "weight", weight_list);
    const aclTensor* weight_scale = Only(plan, "antiquantScale", antiquant_scale);
    const aclTensor* x_scale = Only(plan, "perTokenScale", per_token_scale);
    const aclTensor* out = Only(plan, "out", out_list);
    plan.NotNull({{"groupList", groups}});
    plan.Require(!bias && !scale && !offset && !antiquant_offset && !activation_input && !activation_scale &&
                     !activation_offset && !tuning && !feature_out && !scale_out && activation == 0,
                 "the simulator knows FP8 rows times FP4 weights without bias, activation and tuning only");
    plan.Type("x", x, {DataType::kFloat8E4m3});
    CheckWeight(plan, *weight);
    plan.Type("antiquantScale", weight_scale, {DataType::kFloat8E8m0});
    plan.Type("perTokenScale", x_scale, {DataType::kFloat8E8m0});
    plan.Type("groupList", groups, {DataType::kInt64});
    plan.Type("out", out, {DataType::kFloat, DataType::kFloat16, DataType::kBf16});
    plan.Require(x->rank() == 2 && x->dim(1) == weight->dim(2),
                 "x of " + DimsText(x->dims) + " does not fit weight of " + DimsText(weight->dims));
    plan.Shape("antiquantScale", weight_scale, MxScaleDims(weight->dims));
    plan.Shape("perTokenScale", x_scale, MxScaleDims(x->dims));
    plan.Shape("groupList", groups, {weight->dim(0)});
    plan.Shape("out", out, {x->dim(0), weight->dim(1)});
    plan.Require(split_item == 3 && group_type == 0 && group_list_type == 1,
                 "the simulator knows splitItem 3, groupType 0 and groupListType 1 only");
    plan.Require(quant_group == kMxGroup, "quantGroupSize is " + std::to_string(quant_group));
    plan.Attribute("quantGroupSize", quant_group);
    plan.Touches({x, weight, weight_scale, x_scale, groups, out});
    plan.Work([x = *x, x_scale = *x_scale, weight = *weight, weight_scale = *weight_scale, groups = *groups,
               out = *out](const Memory& memory) { RunGroups(memory, x, x_scale, weight, weight_scale, groups, out); });
  });
}
SIM_PHASE_TWO(aclnnGroupedMatmulWeightNz)
