// The operator table: for each CANN operator its name, the exact types of its first-phase arguments, where it must come
// from and the CANN versions for which the argument list is known (spec: ascend 5, 5.6).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "acl_min.h"

namespace deepinfer::ascend {

enum class Origin { kCann, kCustom };

struct OperatorInfo {
  const char* name;
  Origin origin;
  const char* first_version;  // inclusive, "major.minor"
  const char* last_version;   // inclusive
  std::string signature;
};

// Arguments are those of the first phase without the two that end every such call.
template <class... Arguments>
struct Operator {
  using PhaseOne = aclnnStatus(Arguments..., uint64_t*, aclOpExecutor**);
  const char* name;

  OperatorInfo info() const { return {name, Origin::kCann, "9.2", "9.2", SignatureText<Arguments...>()}; }
};

using In = const aclTensor*;
using Out = aclTensor*;

// x, gamma, eps; y, rstd
inline constexpr Operator<In, In, double, Out, Out> kRmsNorm{"aclnnRmsNorm"};
// self, mat2; out, cube math type
inline constexpr Operator<In, In, Out, int8_t> kMatmul{"aclnnMatmul"};
// x, axis, round mode, destination type, block size, scale algorithm; y, scale
inline constexpr Operator<In, int64_t, const char*, int64_t, int64_t, int64_t, Out, Out> kDynamicMxQuant{
    "aclnnDynamicMxQuant"};
// x1, x2, x1 scale, x2 scale, y scale, x1 offset, x2 offset, y offset, bias, transpose x1, transpose x2, group; out
inline constexpr Operator<In, In, In, In, In, In, In, In, In, bool, bool, int64_t, Out> kQuantMatmul{
    "aclnnQuantMatmulV5"};
// x (in place), cos, sin, mode, slice
inline constexpr Operator<Out, In, In, int64_t, const aclIntArray*> kPartialRotary{"aclnnInplacePartialRotaryMul"};
// x, weight, group index, scale, destination type, quantisation mode, block size, round scale, clamp limit,
// largest value, output origin; y, y scale, y origin
inline constexpr Operator<In, In, In, In, int64_t, int64_t, int64_t, bool, double, double, bool, Out, Out, Out>
    kSwigluQuant{"aclnnSwigluGroupQuant"};
// x, bias, input ids, id table, k, groups kept, groups, group rule, renormalise, norm type, output flag, scaling, eps;
// y, expert ids, normed scores
inline constexpr Operator<In, In, In, In, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, double, double,
                          Out, Out, Out>
    kGatingTopK{"aclnnMoeGatingTopKV2"};
// variable (in place), indices, updates
inline constexpr Operator<Out, In, In> kScatterNdUpdate{"aclnnScatterNdUpdate"};
// x, weight, bias, scale, offset, antiquant scale, antiquant offset, per-token scale, group list, activation input,
// activation quant scale, activation quant offset, split item, group type, group list type, activation, tuning,
// quant group size; out, activation feature, dynamic quant scale
using List = const aclTensorList*;
inline constexpr Operator<List, List, List, List, List, List, List, List, In, List, List, List, int64_t, int64_t,
                          int64_t, int64_t, const aclIntArray*, int64_t, aclTensorList*, aclTensorList*, aclTensorList*>
    kGroupedMatmulNz{"aclnnGroupedMatmulWeightNz"};
// nine optional length tensors; heads q, heads kv, head dim, batch, three largest lengths, two top-k, ratio, two masks,
// two window sides, two layouts, two flags; metadata
inline constexpr Operator<In, In, In, In, In, In, In, In, In, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                          int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const char*,
                          const char*, bool, bool, Out>
    kSparseMlaMetadata{"aclnnSparseFlashMlaMetadata"};
// q, ori kv, cmp kv, two sparse indices, two block tables, three cumulative lengths, three used lengths, residual, two
// top-k lengths, sinks, metadata; softmax scale, ratio, two masks, two window sides, two layouts, value mode, lse flag;
// out, lse
inline constexpr Operator<In, In, In, In, In, In, In, In, In, In, In, In, In, In, In, In, In, In, double, int64_t,
                          int64_t, int64_t, int64_t, int64_t, const char*, const char*, int64_t, bool, Out, Out>
    kSparseMla{"aclnnSparseFlashMla"};
// two cumulative lengths, two used lengths, residual; heads q, heads k, head dim, top-k, quantisation mode, batch, two
// largest lengths, two layouts, mask, ratio; metadata
inline constexpr Operator<In, In, In, In, In, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                          const char*, const char*, int64_t, int64_t, Out>
    kIndexerMetadata{"aclnnQuantLightningIndexerV2Metadata"};
// query, key, weights, query scale, key scale, two cumulative lengths, two used lengths, residual, block table, index
// offset, metadata; top-k, quantisation mode, largest query length, two layouts, mask, ratio, value flag; indices,
// values. The form of the operator's own document: other forms exist under this name (spec: ascend 5.6).
inline constexpr Operator<In, In, In, In, In, In, In, In, In, In, In, In, In, int64_t, int64_t, int64_t, const char*,
                          const char*, int64_t, int64_t, int64_t, Out, Out>
    kIndexer{"aclnnQuantLightningIndexerV2"};

// Every operator above, in that order.
std::vector<OperatorInfo> AllOperators();

// The table's entry, or nullptr.
const OperatorInfo* FindOperator(const std::string& name);

// 9 and 2 of "9.2", "9.2.0" or "9.2.RC1"; -1 and -1 for another text.
std::pair<int, int> MajorMinor(const std::string& version);

// True when `version` lies in the entry's range; compares major and minor.
bool CoversVersion(const OperatorInfo& info, const std::string& version);

}  // namespace deepinfer::ascend
