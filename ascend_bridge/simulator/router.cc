// The choice of experts (spec: ascend 5.3).
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "operator.h"

using namespace ascend_sim;

namespace {

// ln(1 + e^x) without overflow.
double Softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

struct Gating {
  aclTensor x, bias, y, ids;
  int64_t k;
  double scaling, eps;

  void operator()(const Memory& memory) const {
    const Values logits = memory.Load(x), added = memory.Load(bias);
    const int64_t experts = x.dim(1);
    Values weights, chosen;
    for (int64_t row = 0; row < x.dim(0); ++row) {
      Values scores(static_cast<size_t>(experts));
      for (int64_t e = 0; e < experts; ++e) scores[e] = std::sqrt(Softplus(logits[row * experts + e]));
      std::vector<int64_t> order(static_cast<size_t>(experts));
      std::iota(order.begin(), order.end(), 0);
      // Our choice where the order of equal scores is not documented: the lower id first.
      const auto is_better = [&](int64_t a, int64_t b) { return scores[a] + added[a] > scores[b] + added[b]; };
      std::stable_sort(order.begin(), order.end(), is_better);
      double total = eps;
      for (int64_t i = 0; i < k; ++i) total += scores[order[i]];
      for (int64_t i = 0; i < k; ++i) {
        weights.push_back(scores[order[i]] / total * scaling);
        chosen.push_back(static_cast<double>(order[i]));
      }
    }
    memory.Store(y, weights);
    memory.Store(ids, chosen);
  }
};

}  // namespace

SIM_EXPORT aclnnStatus aclnnMoeGatingTopKV2GetWorkspaceSize(
    const aclTensor* x, const aclTensor* bias, const aclTensor* input_ids, const aclTensor* id_table, int64_t k,
    int64_t groups_kept, int64_t groups, int64_t group_rule, int64_t renorm, int64_t norm_type, bool out_flag,
    double scaling, double eps, const aclTensor* y, const aclTensor* ids, const aclTensor* out, uint64_t* bytes,
    aclOpExecutor** executor) {
  return Prepare("aclnnMoeGatingTopKV2", bytes, executor, [&](Plan& plan) {
    plan.NotNull({{"x", x}, {"bias", bias}, {"yOut", y}, {"expertIdxOut", ids}, {"outOut", out}});
    plan.Require(!input_ids && !id_table, "the simulator knows no hash routing");
    plan.Type("x", x, {DataType::kFloat});
    plan.Type("bias", bias, {x->dtype});
    plan.Type("yOut", y, {x->dtype});
    plan.Type("expertIdxOut", ids, {DataType::kInt32});
    plan.Type("outOut", out, {DataType::kFloat});
    plan.Require(x->rank() == 2 && x->dim(1) <= 2048,
                 "x of " + DimsText(x->dims) + " is no matrix of 2048 columns at most");
    plan.Require(k >= 1 && k <= x->dim(1), "k is " + std::to_string(k));
    plan.Require(groups == 1 && groups_kept == 1, "the simulator knows one group only");
    plan.Require(norm_type == 2 && !out_flag, "the simulator knows normType 2 without outOut only");
    plan.Shape("bias", bias, {x->dim(1)});
    plan.Shape("yOut", y, {x->dim(0), k});
    plan.Shape("expertIdxOut", ids, y->dims);
    plan.Shape("outOut", out, x->dims);
    plan.Attribute("groupSelectMode", static_cast<double>(group_rule));
    plan.Attribute("renorm", static_cast<double>(renorm));
    plan.Attribute("routedScalingFactor", scaling);
    plan.Attribute("eps", eps);
    plan.Touches({x, bias, y, ids, out});
    plan.Work(Gating{*x, *bias, *y, *ids, k, scaling, eps});
  });
}
SIM_PHASE_TWO(aclnnMoeGatingTopKV2)
