// python/src/policy.cc - policies of `lacuna image compress` (io/image_policy.h).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "io/image_policy.h"

namespace lacuna::python {

namespace nb = nanobind;
using io::ImagePolicy;

void bind_policy(nb::module_& m) {
  nb::class_<ImagePolicy>(m, "Policy", "Which matrix gets which layout, by name: docs/image.md, \"Policies\".")
      .def_static("load", &ImagePolicy::load, nb::arg("name_or_path"),
                  "A policy that is built in, or a JSON file. Raises Error for another name and for a bad file.")
      .def_static("parse", &ImagePolicy::parse, nb::arg("text"), nb::arg("where"),
                  "A policy as JSON text. where: begins errors.")
      .def(
          "choose",
          [](const ImagePolicy& policy, const std::string& tensor) {
            const ImagePolicy::Choice choice = policy.choose(tensor);
            std::optional<std::string> layout;
            if (choice.layout != nullptr) layout = choice.layout->name;
            return std::pair{layout, choice.rule};
          },
          nb::arg("tensor"),
          "Layout of a tensor, None: as it is stored; and the index of the rule that says so, -1: the rest's.")
      .def_prop_ro(
          "rules",
          [](const ImagePolicy& policy) {
            std::vector<std::string> out;
            for (size_t i = 0; i < policy.rule_count(); ++i) out.push_back(policy.rule_name(i));
            return out;
          },
          "Names of the rules.")
      .def_prop_ro("name", &ImagePolicy::name)
      .def_prop_ro("text", &ImagePolicy::text, "As JSON.")
      .def_prop_ro("built_in", &ImagePolicy::built_in);
}

}  // namespace lacuna::python
