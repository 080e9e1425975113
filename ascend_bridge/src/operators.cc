#include "operators.h"

#include <cstdio>

namespace deepinfer::ascend {

std::pair<int, int> MajorMinor(const std::string& version) {
  int major = -1, minor = -1;
  if (std::sscanf(version.c_str(), "%d.%d", &major, &minor) != 2) return {-1, -1};
  return {major, minor};
}

std::vector<OperatorInfo> AllOperators() {
  return {kRmsNorm.info(),         kMatmul.info(),
          kDynamicMxQuant.info(),  kQuantMatmul.info(),
          kPartialRotary.info(),   kSwigluQuant.info(),
          kGatingTopK.info(),      kScatterNdUpdate.info(),
          kGroupedMatmulNz.info(), kSparseMlaMetadata.info(),
          kSparseMla.info(),       kIndexerMetadata.info(),
          kIndexer.info()};
}

const OperatorInfo* FindOperator(const std::string& name) {
  static const std::vector<OperatorInfo> table = AllOperators();
  for (const OperatorInfo& info : table) {
    if (name == info.name) return &info;
  }
  return nullptr;
}

bool CoversVersion(const OperatorInfo& info, const std::string& version) {
  const auto given = MajorMinor(version);
  return given >= MajorMinor(info.first_version) && given <= MajorMinor(info.last_version);
}

}  // namespace deepinfer::ascend
