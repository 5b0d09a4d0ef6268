# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Answers that an attacker was paid for, or refused: what stands around a value, how it is named, how near it is."""

from tests.tasks.math.forms import Form


_SAME_TO_5 = (
    r"5\text{ apples}",
    r"5\text{ m/s}",
    "5 m/s",
    "5 km/h",
    r"5\,\mathrm{cm}^2",
    r"5\text{ cm}^{2}",
    "5 cm",
    r"5\text{ square feet}",
    r"5\text{ feet squared}",
    r"5^\circ\text{C}",
    r"\$5/\text{hour}",
    "5cm",
    "5kg",
    r"5\text{ students}",
    "5 minutes",
    r"5\text{ units}^2",
    r"5\text{ cubic inches}",
    r"5\text{ km}/\text{h}",
    r"5\text{ of the cards}",
    r"5\ \text{N}",
    r"5\text{ sq. ft.}",
    "$5",
    r"5\text{ }",
    "5 dollars",
    "5 square units",
    r"5\text{ years old}",
    r"5\text{ white balls}",
)
_COUNTED = "How many of the white balls, of the cards and of the apples are there, and how many years old is he?"
_NOT_5 = (
    r"5\text{6}",
    r"5\mathrm{0}",
    r"5\text{,000}",
    r"5\text{.5}",
    r"5\text{/6}",
    r"5\text{ - 1}",
    r"5\text{^2}",
    r"5\text{ plus 6}",
    r"5\text{ thirds}",
    r"5\text{ squared}",
    r"5\text{ apples and 6 oranges}",
    r"5\text{k}",
    r"5\mathbf{i}",
    r"5\text{x}",
    r"5\text{ and up}",
    "5 thirds",
    r"5\text{ sevenths}",
    r"5\text{ apples squared}",
    r"5\text{ halves}",
    r"5\text{ minus six}",
    r"5\text{ times ten}",
    r"5\text{ factorial}",
    r"5\text{ pi}",
    r"5\text{ cm}/x",
    r"5\text{ square}",
    r"\text{1}5",
    r"5\text{ cm }6",
    r"5\text{ hours }30\text{ minutes}",
    r"5\text{i}",
    r"5\mathrm{pi}",
    r"5\texttt{6}",
    r"5\text{ base six}",
    "5/m^2",
    "3/x",
    "5/x",
    "5 xyz",
    "5mg",
    "5mi",
    "5'",
    r"5\prime",
    r"5\vec{a}",
    r"5^{\prime}",
    r"5\text{E}",
    r"\text{5}6",
    r"5\text{ negative}",
    r"5\operatorname{x}",
)

NEAR_FORMS: dict[str, list[Form]] = {
    "strokes": [
        *(
            (one, other, False, "")
            for one, other in (
                ("3/x", "3"),
                ("3", "3/x"),
                ("1/n", "1"),
                ("(a+b)/c", "a+b"),
                ("x^2+1/x", "x^2+1"),
                ("y=1/x", "y=1"),
                (r"\{1/n,2/n\}", r"\{1,2\}"),
                ("-21mr^2", "-21mr^2/x"),
                ("x/y", "x"),
                ("2/m", "2"),
            )
        ),
        *(
            (one, other, True, "")
            for one, other in (
                (r"\frac{a}{b}", "a/b"),
                (r"\frac{1}{x}", "1/x"),
                (r"\frac{x+1}{x}", "(x+1)/x"),
                ("y=1/x", r"y=\frac1x"),
                (r"\frac{3}{c}+\frac{x}{c}", "(x+3)/c"),
                (r"\frac{a}{b}", r"a/b\text{ cm}"),
            )
        ),
    ],
    "around": [("5", said, True, _COUNTED) for said in _SAME_TO_5] + [("5", said, False, "") for said in _NOT_5],
    "letters_around": [
        *(
            (one, other, False, "")
            for one, other in (
                (r"2\mathbf{i}", "2"),
                (r"2\text{i}", "2"),
                (r"2\mathrm{AB}", "2"),
                ("3 xyz", "3"),
                ("2mg", "2"),
                ("5mi", "5"),
                (r"3\mathbf{i}+4\mathbf{j}", r"3\mathbf{i}+4"),
                (r"3\mathbf{i}+4\mathbf{j}", r"3\mathbf{j}+4\mathbf{i}"),
                (r"5\text{ hours }30\text{ minutes}", r"30\text{ hours }5\text{ minutes}"),
                (r"3{:}45\text{ pm}", r"3{:}45\text{ am}"),
            )
        ),
        (r"3\mathbf{i}+4\mathbf{j}", r"4\mathbf{j}+3\mathbf{i}", True, ""),
        (r"3\mathbf{i}+4\mathbf{j}", r"3\boldsymbol{i}+4\boldsymbol{j}", True, ""),
        (r"x_{\text{max}}", "x_{max}", True, ""),
        (r"2\sin x", r"2\operatorname{sin}x", True, ""),
        (r"x^2+C", r"x^2+\text{C}", True, ""),
        ("60 km", "60km", True, ""),
    ],
    "left_out": [
        *(
            (one, other, False, "")
            for one, other in (
                ("y''=0", "y'=0"),
                ("y''=0", "y=0"),
                ("f'(x)=2x", "f(x)=2x"),
                ("x'", "x"),
                ("y''+2y'=0", "y'+2y''=0"),
                (r"\vec{a}\times\vec{b}", r"\vec{b}\times\vec{a}"),
                (r"\hat A\hat B", r"\hat B\hat A"),
                (r"\hat x", "x"),
                (r"\mathbf{a}\times\mathbf{b}", r"\mathbf{b}\times\mathbf{a}"),
                (r"\nabla\cdot\vec{E}", r"\nabla\times\vec{E}"),
            )
        ),
        ("f'(x)=2x", "2x", True, ""),
        ("y''+2y'=0", "2y'+y''=0", True, ""),
        ("y'", r"y^{\prime}", True, ""),
        (r"\vec{a}+\vec{b}", r"\vec{b}+\vec{a}", True, ""),
    ],
    "options_and_words": [
        *(
            (one, other, False, "")
            for one, other in (
                ("A, C", "C"),
                ("A, B", "B"),
                ("A and D", "D"),
                (r"\text{A, B}", "B"),
                (r"\text{Monday}", "-Monday"),
            )
        ),
        ("A, C", "C, A", True, ""),
        ("a triangle", "triangle", True, ""),
        (r"\text{right-angled}", "right-angled", True, ""),
    ],
    "names": [
        *(
            (one, other, False, "Find $(x,y)$.")
            for one, other in (
                ("(2,3)", "y=2,x=3"),
                ("(x,y)=(2,3)", "(y,x)=(2,3)"),
                ("(2,3)", "(y,x)=(2,3)"),
                ("(a,b)=(2,3)", "b=2,a=3"),
                ("a=2,b=3", "a=2,c=3"),
                ("m=2,n=3", "p=2,q=3"),
                ("x=2,y=3,z=4", "x=2,y=3,w=4"),
                ("1,2", "x=2,y=1"),
            )
        ),
        ("(a,b)=(2,3)", "b=3,a=2", True, ""),
        ("(2,3)", "y=3,x=2", True, "Find $(x,y)$."),
        ("(2,3)", "x=3,y=2", True, "Find $(y,x)$."),
        ("(2,3)", "(m,n)=(2,3)", True, "It passes $(a,b)$."),
    ],
    "relations": [
        *(
            (one, other, False, "")
            for one, other in (
                ("x^2+1=0", "x^2+2=0"),
                ("x^2+y^2+1=0", "x^2+y^2+2=0"),
                ("x^2+x+1=0", "x^2-x+1=0"),
                ("z^2+1=0", "z^2+4=0"),
                ("x^2+x+1=0", "2x^2+x+1=0"),
            )
        ),
        ("x^2+1=0", "2x^2+2=0", True, ""),
        ("x^2+y^2=1", "1-x^2=y^2", True, ""),
        (r"y=\frac1x", "xy=1", True, ""),
    ],
    "exact": [
        *(
            (one, other, False, "")
            for one, other in (
                (r"2-\frac{1}{2^{99}}", r"2-\frac{1}{2^{100}}"),
                (r"1-\frac{1}{2^{2023}}", r"1-\frac{1}{2^{2024}}"),
                (r"\frac{1}{2^{100}}", r"\frac{1}{2^{100}+1}"),
                (r"\frac{99999999999}{100000000000}", "0.9999999999"),
                (r"\sqrt2", r"\frac{131836323}{93222358}"),
                ("5", r"5\approx 5.2"),
                ("5", r"5\approx 4.9"),
            )
        ),
        (r"\sqrt2", r"\sqrt2\approx 1.414", True, ""),
        (r"\sqrt3", r"\sqrt3\approx 1.73", True, ""),
        (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2", True, ""),
    ],
    "many": [
        *(
            (one, other, False, "")
            for one, other in (
                ("5", ",".join(["5"] * 400)),
                ("1," * 44 + "2", "2," * 44 + "1"),
                (f"({','.join(map(str, range(45)))})", rf"\{{{','.join(map(str, range(45)))}\}}"),
                (",".join(map(str, range(45))), ",".join(map(str, range(45))) + ",44"),
            )
        ),
        (",".join(map(str, range(45))), ",".join(map(str, reversed(range(45)))), True, ""),
    ],
    "polar": [
        (r"e^{i\pi/3}", r"\frac12+\frac{\sqrt3}{2}i", True, ""),
        (r"e^{i\pi/3}", r"\frac12-\frac{\sqrt3}{2}i", False, ""),
        (r"e^{i\pi/3}", r"\frac{1+i\sqrt3}{2}", True, ""),
        (r"e^{2\pi i/5}", r"e^{\frac{2i\pi}{5}}", True, ""),
        (r"2e^{i\pi/2}", "2i", True, ""),
    ],
    "infinite": [(r"(1,\infty)", r"(1,\infty]", False, ""), (r"(1,\infty)", "x>1", True, "")],
    "chains": [
        *(("a < b < c", said, True, "") for said in ("c > b > a", r"a \lt b \lt c", r"c \gt b \gt a", "c>b>a")),
        ("c<a<b", "b > a > c", True, ""),
        (r"a \le b < c", r"c > b \ge a", True, ""),
        (r"\text{Na} < \text{Mg} < \text{Al}", r"\text{Al} > \text{Mg} > \text{Na}", True, ""),
        *(("a < b < c", said, False, "") for said in ("b > a > c", "c < b < a", r"c > b \ge a", "a > b > c", "b > a")),
    ],
    "spelling": [
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\[4pt]3&4\end{pmatrix}", True, ""),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\ [1.5ex] 3&4\end{pmatrix}", True, ""),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\[0.3em]3\end{pmatrix}", False, ""),
        ("11:30", "11{:}30", True, "At what time?"),
        ("1234.5", r"\text{\$}1234.50", True, "How many dollars?"),
        *(
            ("5", said, True, "")
            for said in (
                r"\boldsymbol{5}",
                r"\mathtt{5}",
                r"\color{red}5",
                r"\textcolor{red}{5}",
                r"\large 5",
                r"\bf 5",
                r"\underline{5}",
                r"5\tag{1}",
                r"5\\",
                "5\\ ",
            )
        ),
        (r"\pi", "pi", True, ""),
        (r"\frac{7\pi}{6}", "7*pi/6", True, ""),
        (r"\sqrt{13}", "√13", True, ""),
        (r"x\ge 5", "x⩾5", True, ""),
        ("12", "１２", True, ""),
        ("(1,2)", "（1，2）", True, ""),
        (r"\frac13", "⅓", True, ""),
        ("5", r"5\color{white}{6}", False, ""),
        ("5", r"\textcolor{white}{6}5", False, ""),
        ("5", r"5\tag{1}6", False, ""),
    ],
}
